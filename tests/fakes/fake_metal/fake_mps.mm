// MPS's matrix kernels, in double, and what their descriptors must fulfil.
#include <cstring>

#include "fake.h"

using Kind = fake::Command::Kind;

namespace {

struct Shape {
  NSUInteger rows = 0, columns = 0, matrices = 1, row_bytes = 0, matrix_bytes = 0;
  MPSDataType type = MPSDataTypeInvalid;
};
struct MatrixState {
  Shape shape;  // of an array as it lies in memory
  FakeBuffer* buffer = nil;
  NSUInteger offset = 0;
  bool transposed = false;  // of an array
};
struct ArrayShape {
  Shape shape;
  bool packed = false, transposed = false;
};
struct KernelState {
  bool left = false, right = false;
  NSUInteger rows = 0, columns = 0, inner = 0;
  double alpha = 1, beta = 0;
};

using fake::state;

size_t element(MPSDataType type) {
  return type == MPSDataTypeFloat32 ? 4 : type == MPSDataTypeFloat16 || type == MPSDataTypeBFloat16 ? 2 : 0;
}

uint8_t* address(const MatrixState& m, NSUInteger matrix, NSUInteger row, NSUInteger column) {
  return [m.buffer gpu] + m.offset + matrix * m.shape.matrix_bytes + row * m.shape.row_bytes + column * element(m.shape.type);
}

double load(const MatrixState& m, NSUInteger matrix, NSUInteger row, NSUInteger column) {
  uint8_t* p = address(m, matrix, row, column);
  if (m.shape.type == MPSDataTypeFloat32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  if (m.shape.type == MPSDataTypeBFloat16) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, p, 2);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  __fp16 x;
  std::memcpy(&x, p, 2);
  return static_cast<float>(x);
}

void store(const MatrixState& m, NSUInteger matrix, NSUInteger row, NSUInteger column, double value) {
  uint8_t* p = address(m, matrix, row, column);
  auto f = static_cast<float>(value);
  if (m.shape.type == MPSDataTypeFloat32) {
    std::memcpy(p, &f, 4);
  } else if (m.shape.type == MPSDataTypeBFloat16) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if (f == f) bits += 0x7fff + (bits >> 16 & 1);
    std::memcpy(p, reinterpret_cast<uint8_t*>(&bits) + 2, 2);
  } else {
    auto h = static_cast<__fp16>(f);
    std::memcpy(p, &h, 2);
  }
}

bool check(const char* name, const MatrixState& m, NSUInteger length) {
  const Shape& s = m.shape;
  auto broken = [&](const std::string& what) {
    fake::violation("mps-descriptor", std::string(name) + ": " + what);
    return false;
  };
  size_t size = element(s.type);
  if (!size) return broken("a data type that is neither float16 nor float32");
  if (!s.rows || !s.columns || !s.matrices) return broken("no rows, columns or matrices");
  if (s.row_bytes % size || s.row_bytes < s.columns * size)
    return broken("rowBytes " + std::to_string(s.row_bytes) + " for " + std::to_string(s.columns) + " columns");
  if (s.matrices > 1 && (s.matrix_bytes % s.row_bytes || s.matrix_bytes < s.rows * s.row_bytes))
    return broken("matrixBytes " + std::to_string(s.matrix_bytes) + " for " + std::to_string(s.rows) + " rows of " +
                  std::to_string(s.row_bytes));
  if (m.offset % size) return broken("offset " + std::to_string(m.offset));
  NSUInteger need = m.offset + (s.matrices - 1) * s.matrix_bytes + s.rows * s.row_bytes;  // stricter than it may be: whole rows
  if (need > length) return broken(std::to_string(need) + " bytes in a buffer of " + std::to_string(length));
  return true;
}

// alpha * op(A) op(B) + beta * D.
std::string multiply(const KernelState& k, const MatrixState& a, const MatrixState& b, const MatrixState& d) {
  for (auto* m : {&a, &b, &d})
    if (![FakeBuffer alive:m->buffer]) {
      fake::violation("freed-in-flight", "a matrix's buffer is gone");
      return "";
    }
  int code;
  if (fake::fault("mps", &code)) return "injected: MPS failed";
  for (NSUInteger i = 0; i < d.shape.matrices; i++)
    for (NSUInteger r = 0; r < k.rows; r++)
      for (NSUInteger c = 0; c < k.columns; c++) {
        double sum = 0;
        for (NSUInteger x = 0; x < k.inner; x++)
          sum += (k.left ? load(a, i, x, r) : load(a, i, r, x)) * (k.right ? load(b, i, c, x) : load(b, i, x, c));
        double before = k.beta != 0 ? k.beta * load(d, i, r, c) : 0;
        store(d, i, r, c, k.alpha * sum + before);
      }
  return "";
}

void fits(const char* what, const MatrixState& m, NSUInteger rows, NSUInteger columns) {
  if (m.shape.rows != rows || m.shape.columns != columns)
    fake::violation("mps-descriptor", std::string(what) + " is " + std::to_string(m.shape.rows) + " x " + std::to_string(m.shape.columns) +
                                          "; the kernel takes " + std::to_string(rows) + " x " + std::to_string(columns));
}

void encode(FakeCommandBuffer* commands, const KernelState& k, const MatrixState& a, const MatrixState& b, const MatrixState& d,
            bool whole_a) {
  if (whole_a) fits("left matrix", a, k.left ? k.inner : k.rows, k.left ? k.rows : k.inner);
  fits("right matrix", b, k.right ? k.columns : k.inner, k.right ? k.inner : k.columns);
  if (a.shape.matrices != d.shape.matrices || b.shape.matrices != d.shape.matrices)
    fake::violation("mps-descriptor", "batches that differ");
  if (a.shape.type != b.shape.type) fake::violation("mps-descriptor", "left and right of different types");
  if (![commands retainedReferences]) fake::violation("mps-unretained", "MPS on a command buffer that does not retain what it uses");
  auto* c = [commands add:Kind::mps from:nil];
  if (!c) return;
  c->run = std::make_shared<std::function<std::string()>>([=] { return multiply(k, a, b, d); });
  FakeBuffer* touched[] = {a.buffer, b.buffer, d.buffer};
  auto* first = reinterpret_cast<const uint8_t*>(touched);
  c->bytes.assign(first, first + sizeof(touched));
  for (auto* m : {&a, &b, &d}) {
    auto* keep = [commands add:Kind::buffer from:nil];
    keep->object = commands->retained ? [m->buffer retain] : m->buffer;
    keep->index = 0;
  }
}

}  // namespace

extern "C" BOOL MPSSupportsMTLDevice(id<MTLDevice> device) { return device && fake::settings.mps; }

@implementation MPSMatrixDescriptor
FAKE_LIFE(Shape)
+ (instancetype)matrixDescriptorWithRows:(NSUInteger)rows
                                 columns:(NSUInteger)columns
                                matrices:(NSUInteger)matrices
                                rowBytes:(NSUInteger)rowBytes
                             matrixBytes:(NSUInteger)matrixBytes
                                dataType:(MPSDataType)type {
  MPSMatrixDescriptor* d = [[[MPSMatrixDescriptor alloc] init] autorelease];
  state<Shape>(d->fakeState) = {rows, columns, matrices, rowBytes, matrixBytes, type};
  return d;
}
@end

@implementation MPSMatrix
FAKE_LIFE(MatrixState)
- (instancetype)initWithBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset descriptor:(MPSMatrixDescriptor*)descriptor {
  self = [self init];
  MatrixState& m = state<MatrixState>(fakeState) = {state<Shape>(descriptor->fakeState), (FakeBuffer*)buffer, offset};
  if (!check("MPSMatrix", m, [buffer length]) || fake::fault("mps_matrix")) {
    [self release];
    return nil;
  }
  return self;
}
@end

@implementation MPSVectorDescriptor
FAKE_LIFE(Shape)
+ (instancetype)vectorDescriptorWithLength:(NSUInteger)length dataType:(MPSDataType)type {
  MPSVectorDescriptor* d = [[[MPSVectorDescriptor alloc] init] autorelease];
  state<Shape>(d->fakeState) = {1, length, 1, length * element(type), 0, type};
  return d;
}
@end

@implementation MPSVector
FAKE_LIFE(MatrixState)
- (instancetype)initWithBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset descriptor:(MPSVectorDescriptor*)descriptor {
  self = [self init];
  MatrixState& m = state<MatrixState>(fakeState) = {state<Shape>(descriptor->fakeState), (FakeBuffer*)buffer, offset};
  if (!check("MPSVector", m, [buffer length])) {
    [self release];
    return nil;
  }
  return self;
}
@end

@implementation MPSKernel
FAKE_LIFE(KernelState)
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end
@implementation MPSMatrixBinaryKernel
@end

@implementation MPSMatrixMultiplication
- (instancetype)initWithDevice:(id<MTLDevice>)device
                 transposeLeft:(BOOL)left
                transposeRight:(BOOL)right
                    resultRows:(NSUInteger)rows
                 resultColumns:(NSUInteger)columns
               interiorColumns:(NSUInteger)inner
                         alpha:(double)alpha
                          beta:(double)beta {
  (void)device;
  self = [self init];
  state<KernelState>(fakeState) = {left != NO, right != NO, rows, columns, inner, alpha, beta};
  if (fake::fault("mps_kernel")) {
    [self release];
    return nil;
  }
  return self;
}
- (void)encodeToCommandBuffer:(id<MTLCommandBuffer>)commands leftMatrix:(MPSMatrix*)a rightMatrix:(MPSMatrix*)b resultMatrix:(MPSMatrix*)d {
  KernelState& k = state<KernelState>(fakeState);
  fits("result matrix", state<MatrixState>(d->fakeState), k.rows, k.columns);
  encode((FakeCommandBuffer*)commands, k, state<MatrixState>(a->fakeState), state<MatrixState>(b->fakeState),
         state<MatrixState>(d->fakeState), true);
}
@end

// y = alpha * op(A) x + beta * y, as a product of x as a row with op(A) transposed.
@implementation MPSMatrixVectorMultiplication
- (instancetype)initWithDevice:(id<MTLDevice>)device
                     transpose:(BOOL)transpose
                          rows:(NSUInteger)rows
                       columns:(NSUInteger)columns
                         alpha:(double)alpha
                          beta:(double)beta {
  (void)device;
  self = [self init];
  state<KernelState>(fakeState) = {false, transpose == NO, 1, rows, columns, alpha, beta};
  return self;
}
- (void)encodeToCommandBuffer:(id<MTLCommandBuffer>)commands
                  inputMatrix:(MPSMatrix*)a
                  inputVector:(MPSVector*)x
                 resultVector:(MPSVector*)y {
  KernelState& k = state<KernelState>(fakeState);
  fits("input vector", state<MatrixState>(x->fakeState), 1, k.inner);
  fits("result vector", state<MatrixState>(y->fakeState), 1, k.columns);
  encode((FakeCommandBuffer*)commands, k, state<MatrixState>(x->fakeState), state<MatrixState>(a->fakeState),
         state<MatrixState>(y->fakeState), false);
}
@end

@implementation MPSNDArrayDescriptor
FAKE_LIFE(ArrayShape)
+ (instancetype)descriptorWithDataType:(MPSDataType)type dimensionCount:(NSUInteger)count dimensionSizes:(NSUInteger*)sizes {
  if (count != 2) fake::violation("mps-ndarray", "the fake has arrays of two dimensions, not of " + std::to_string(count));
  MPSNDArrayDescriptor* d = [[[MPSNDArrayDescriptor alloc] init] autorelease];
  state<ArrayShape>(d->fakeState).shape = {sizes[1], sizes[0], 1, sizes[0] * element(type), 0, type};
  return d;
}
- (void)setPreferPackedRows:(BOOL)packed {
  state<ArrayShape>(fakeState).packed = packed != NO;
}
- (void)transposeDimension:(NSUInteger)one withDimension:(NSUInteger)other {
  if (one > 1 || other > 1) fake::violation("mps-ndarray", "a dimension that there is not");
  state<ArrayShape>(fakeState).transposed ^= one != other;
}
@end

@implementation MPSNDArray
FAKE_LIFE(MatrixState)
+ (BOOL)instancesRespondToSelector:(SEL)selector {
  return fake::settings.mps_ndarray && [super instancesRespondToSelector:selector];
}
- (instancetype)initWithBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset descriptor:(MPSNDArrayDescriptor*)descriptor {
  self = [self init];
  ArrayShape& shape = state<ArrayShape>(descriptor->fakeState);
  MatrixState& m = state<MatrixState>(fakeState) = {shape.shape, (FakeBuffer*)buffer, offset, shape.transposed};
  if (!shape.packed) fake::violation("mps-ndarray", "over a buffer without preferPackedRows: MPS chooses how far rows are apart");
  if (!check("MPSNDArray", m, [buffer length]) || fake::fault("mps_matrix")) {
    [self release];
    return nil;
  }
  return self;
}
@end

@implementation MPSNDArrayMultiaryBase
- (instancetype)initWithDevice:(id<MTLDevice>)device sourceCount:(NSUInteger)count {
  (void)device;
  self = [self init];
  if (count != 2) fake::violation("mps-ndarray", "the fake multiplies two arrays, not " + std::to_string(count));
  if (fake::fault("mps_kernel")) {
    [self release];
    return nil;
  }
  return self;
}
@end
@implementation MPSNDArrayMultiaryKernel
@end

@implementation MPSNDArrayMatrixMultiplication
- (void)setAlpha:(double)alpha {
  state<KernelState>(fakeState).alpha = alpha;
}
- (void)encodeToCommandBuffer:(id<MTLCommandBuffer>)commands
                 sourceArrays:(NSArray<MPSNDArray*>*)sources
             destinationArray:(MPSNDArray*)destination {
  if ([sources count] != 2) fake::violation("mps-ndarray", std::to_string([sources count]) + " sources for two");
  MatrixState &a = state<MatrixState>([sources objectAtIndex:0]->fakeState), &b = state<MatrixState>([sources objectAtIndex:1]->fakeState),
              &d = state<MatrixState>(destination->fakeState);
  if (a.shape.type != d.shape.type) fake::violation("mps-ndarray", "a destination of another type ends the process");
  if (d.transposed) fake::violation("mps-ndarray", "whether a destination may be transposed is not known");
  KernelState k = state<KernelState>(fakeState);
  k.left = a.transposed, k.right = b.transposed;
  k.rows = d.shape.rows, k.columns = d.shape.columns, k.inner = a.transposed ? a.shape.rows : a.shape.columns;
  encode((FakeCommandBuffer*)commands, k, a, b, d, true);
}
@end
