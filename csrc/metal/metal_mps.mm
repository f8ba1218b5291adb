#include "metal_mps.h"

#include <cstring>

#include "../core/error.h"

namespace metalmm::metal {
namespace {

// One operand as it lies in memory, `count` matrices of it.
MPSMatrix* matrix(const Place& at, size_t rows, size_t columns, size_t ld, size_t stride, size_t count, MPSDataType type,
                  std::vector<Handle<id>>& keep) {
  size_t element = type == MPSDataTypeFloat32 ? 4 : 2;
  MPSMatrixDescriptor* descriptor = [MPSMatrixDescriptor matrixDescriptorWithRows:rows
                                                                          columns:columns
                                                                         matrices:count
                                                                         rowBytes:ld * element
                                                                      matrixBytes:(count > 1 ? stride : rows * ld) * element
                                                                         dataType:type];
  MPSMatrix* m = [[MPSMatrix alloc] initWithBuffer:at.buffer offset:at.offset descriptor:descriptor];
  if (!m) throw Error(ErrorKind::device, "mps: no matrix of " + std::to_string(rows) + " x " + std::to_string(columns));
  keep.push_back(Handle<id>::adopt(m));
  return m;
}

MPSVector* vector(const Place& at, size_t length, MPSDataType type, std::vector<Handle<id>>& keep) {
  MPSVectorDescriptor* descriptor = [MPSVectorDescriptor vectorDescriptorWithLength:length dataType:type];
  MPSVector* v = [[MPSVector alloc] initWithBuffer:at.buffer offset:at.offset descriptor:descriptor];
  if (!v) throw Error(ErrorKind::device, "mps: no vector of " + std::to_string(length));
  keep.push_back(Handle<id>::adopt(v));
  return v;
}

Place moved(const Place& place, size_t elements, size_t element) { return {place.buffer, place.offset + elements * element}; }

MPSDataType data_type(DType type) {
  return type == kFloat32 ? MPSDataTypeFloat32 : type == kBFloat16 ? MPSDataTypeBFloat16 : MPSDataTypeFloat16;
}

// MPS takes a batch as one where matrices lie a whole number of rows apart and none is shared; others are encoded one by one.
bool regular(const MpsMatmul& what) {
  const MatmulParams& p = what.p;
  auto fits = [](uint64_t stride, uint64_t ld, uint64_t rows) { return stride >= rows * ld && stride % ld == 0; };
  return p.batch == 1 || (fits(p.stride_a, p.lda, what.transpose_a ? p.k : p.m) && fits(p.stride_b, p.ldb, what.transpose_b ? p.n : p.k));
}

uint64_t bits(double x) {  // of a NaN, too, which no order knows
  uint64_t b;
  std::memcpy(&b, &x, sizeof(b));
  return b;
}

// A matrix whose rows have no gaps, or the transpose of one. Its first dimension is along a row.
MPSNDArray* ndarray(const Place& at, NSUInteger rows, NSUInteger columns, bool is_transposed, MPSDataType type,
                    std::vector<Handle<id>>& keep) __attribute__((availability(macos, introduced = 15.0))) {
  NSUInteger sizes[] = {columns, rows};
  MPSNDArrayDescriptor* descriptor = [MPSNDArrayDescriptor descriptorWithDataType:type dimensionCount:2 dimensionSizes:sizes];
  [descriptor setPreferPackedRows:YES];
  if (is_transposed) [descriptor transposeDimension:0 withDimension:1];
  MPSNDArray* array = [[MPSNDArray alloc] initWithBuffer:at.buffer offset:at.offset descriptor:descriptor];
  if (!array) throw Error(ErrorKind::device, "mps: no array of " + std::to_string(rows) + " x " + std::to_string(columns));
  keep.push_back(Handle<id>::adopt(array));
  return array;
}

}  // namespace

bool has_ndarrays() {
  if (@available(macOS 15.0, *)) return [MPSNDArray instancesRespondToSelector:@selector(initWithBuffer:offset:descriptor:)];
  return false;
}

template <class Make>
id MpsCache::kernel(const Key& key, Make&& make) {
  Handle<id>& found = kernels_[key];
  if (!found) found = Handle<id>::adopt(make());
  if (!found) throw Error(ErrorKind::device, "mps: no kernel for this shape");
  return found.get();
}

void MpsCache::encode_matmul(id<MTLCommandBuffer> commands, const MpsMatmul& what, std::vector<Handle<id>>& keep) {
  std::lock_guard lock(mutex_);  // MPS kernels are for one thread at a time
  const MatmulParams& p = what.p;
  double alpha = what.to_float ? 1.0 : p.alpha, beta = what.to_float || !p.has_c ? 0.0 : p.beta;
  MPSMatrixMultiplication* multiply =
      kernel({Kind::matmul, what.transpose_a, what.transpose_b, p.m, p.n, p.k, bits(alpha), bits(beta)}, [&] {
        return [[MPSMatrixMultiplication alloc] initWithDevice:device_
                                                 transposeLeft:what.transpose_a
                                                transposeRight:what.transpose_b
                                                    resultRows:p.m
                                                 resultColumns:p.n
                                               interiorColumns:p.k
                                                         alpha:alpha
                                                          beta:beta];
      });
  MPSDataType in = data_type(what.type), out = what.to_float ? MPSDataTypeFloat32 : in;
  size_t element = what.type.size, out_element = what.to_float ? 4 : element;
  size_t count = regular(what) ? p.batch : 1, stride_d = static_cast<size_t>(p.m) * p.n;
  for (size_t i = 0; i < p.batch; i += count) {
    MPSMatrix* a = matrix(moved(what.a, i * p.stride_a, element), what.transpose_a ? p.k : p.m, what.transpose_a ? p.m : p.k, p.lda,
                          p.stride_a, count, in, keep);
    MPSMatrix* b = matrix(moved(what.b, i * p.stride_b, element), what.transpose_b ? p.n : p.k, what.transpose_b ? p.k : p.n, p.ldb,
                          p.stride_b, count, in, keep);
    MPSMatrix* d = matrix(moved(what.d, i * stride_d, out_element), p.m, p.n, p.n, stride_d, count, out, keep);
    [multiply encodeToCommandBuffer:commands leftMatrix:a rightMatrix:b resultMatrix:d];
  }
}

// D as a column is op(B) times A as a column: rows and columns are those of op(B).
void MpsCache::encode_matvec(id<MTLCommandBuffer> commands, const MpsMatmul& what, std::vector<Handle<id>>& keep) {
  std::lock_guard lock(mutex_);  // MPS kernels are for one thread at a time
  const MatmulParams& p = what.p;
  double alpha = what.to_float ? 1.0 : p.alpha, beta = what.to_float || !p.has_c ? 0.0 : p.beta;
  MPSMatrixVectorMultiplication* multiply = kernel({Kind::matvec, false, what.transpose_b, 1, p.n, p.k, bits(alpha), bits(beta)}, [&] {
    return [[MPSMatrixVectorMultiplication alloc] initWithDevice:device_
                                                       transpose:!what.transpose_b
                                                            rows:p.n
                                                         columns:p.k
                                                           alpha:alpha
                                                            beta:beta];
  });
  MPSDataType in = data_type(what.type), out = what.to_float ? MPSDataTypeFloat32 : in;
  size_t element = what.type.size, out_element = what.to_float ? 4 : element;
  for (size_t i = 0; i < p.batch; i++) {
    MPSMatrix* b =
        matrix(moved(what.b, i * p.stride_b, element), what.transpose_b ? p.n : p.k, what.transpose_b ? p.k : p.n, p.ldb, 0, 1, in, keep);
    MPSVector* x = vector(moved(what.a, i * p.stride_a, element), p.k, in, keep);
    MPSVector* y = vector(moved(what.d, i * p.n, out_element), p.n, out, keep);
    [multiply encodeToCommandBuffer:commands inputMatrix:b inputVector:x resultVector:y];
  }
}

// A kernel serves every shape: it has its sizes from the arrays. Matrices of a batch go one by one, as PyTorch has them: with more than two
// dimensions M5 gives other bits from run to run (its issue 180776).
void MpsCache::encode_ndarray(id<MTLCommandBuffer> commands, const MpsMatmul& what, std::vector<Handle<id>>& keep) {
  if (@available(macOS 15.0, *)) {
    std::lock_guard lock(mutex_);  // MPS kernels are for one thread at a time
    const MatmulParams& p = what.p;
    MPSNDArrayMatrixMultiplication* multiply = kernel({Kind::ndarray, false, false, 0, 0, 0, bits(p.alpha), 0}, [&] {
      MPSNDArrayMatrixMultiplication* made = [[MPSNDArrayMatrixMultiplication alloc] initWithDevice:device_ sourceCount:2];
      [made setAlpha:p.alpha];
      return made;
    });
    MPSDataType type = data_type(what.type);
    for (size_t i = 0; i < p.batch; i++) {
      MPSNDArray* sources[] = {ndarray(moved(what.a, i * p.stride_a, what.type.size), p.m, p.k, false, type, keep),
                               ndarray(moved(what.b, i * p.stride_b, what.type.size), what.transpose_b ? p.n : p.k,
                                       what.transpose_b ? p.k : p.n, what.transpose_b, type, keep)};
      MPSNDArray* d = ndarray(moved(what.d, i * p.m * p.n, what.type.size), p.m, p.n, false, type, keep);
      [multiply encodeToCommandBuffer:commands sourceArrays:[NSArray arrayWithObjects:sources count:2] destinationArray:d];
    }
  }
}

}  // namespace metalmm::metal
