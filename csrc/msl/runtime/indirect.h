// Of the runtime and of lint's headers.
#pragma once

// What a kernel writes for calls whose size the GPU decides. Fields as Metal's own headers for the host have them.
struct MTLDispatchThreadgroupsIndirectArguments { uint32_t threadgroupsPerGrid[3]; };
struct MTLDispatchThreadsIndirectArguments { uint32_t threadsPerGrid[3], threadsPerThreadgroup[3]; };
struct MTLStageInRegionIndirectArguments { uint32_t stageInOrigin[3], stageInSize[3]; };
struct MTLDrawPrimitivesIndirectArguments { uint32_t vertexCount, instanceCount, vertexStart, baseInstance; };
struct MTLDrawIndexedPrimitivesIndirectArguments { uint32_t indexCount, instanceCount, indexStart; int32_t baseVertex; uint32_t baseInstance; };
