// A CUDA driver without a device, for tests of the code that calls one.
//
// It stands in for libcuda, libcudart, libcublas, libcublasLt, libcurand and libnvrtc. Memory is the host's, and
// nothing is computed: kernels and products leave their outputs as they are, which is zero. The bookkeeping is real.
// - Every allocation has addresses of its own that are never given out again. Copies, fills, products and the arguments
//   of kernels must lie within live allocations, so that a use after free and an overrun are errors.
// - Kernels must be entries of the PTX that was loaded, or registered by objects that nvcc made. Their grids, blocks
//   and shared memory must be ones that a device of compute capability 8.0 takes, and their code must fit the device.
// - Memory runs out, and the compute capability is what a test sets.
//
// What happened is counted in the file that LASER_FAKE_CUDA names (see Shared), where a test reads it and sets what the
// device is. Functions that nothing here defines end the process with their name (tests/cuda.sh makes them).

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <curand.h>

#include <cxxabi.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using std::uint64_t;

// The file: words of 64 bits, then the last error's text, then kernels. engine/tests/engine/driver.rs reads it.
struct Shared {
    uint64_t launches;  // kernels, products of cuBLAS and cublasLt among them
    uint64_t products;
    uint64_t uploads;
    uint64_t uploaded_bytes;
    uint64_t downloads;
    uint64_t downloaded_bytes;
    uint64_t copies;  // from device to device
    uint64_t copied_bytes;
    uint64_t fills;
    uint64_t allocations;
    uint64_t frees;
    uint64_t live_bytes;
    uint64_t synchronisations;
    uint64_t events;  // created, recorded or waited for
    uint64_t refusals;  // allocations for which there was no memory
    uint64_t errors;  // calls that were wrong, whether or not the caller looked at what they returned
    // Set by the test; zeros mean 8.0 and 1 GiB.
    uint64_t capability;  // ten times the major number and the minor one
    uint64_t memory_bytes;
    uint64_t threshold;  // freed memory that the pool keeps, at most
    uint64_t pooled_bytes;  // freed memory that it keeps
    uint64_t lookups;  // of algorithms for products
    uint64_t unused[11];
    char error[512];
    struct {
        char name[120];
        uint64_t launches;
    } kernels[512];
};

Shared* shared() {
    static Shared* const mapped = [] {
        const char* path = std::getenv("LASER_FAKE_CUDA");
        const int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
        if (path && (file < 0 || ftruncate(file, sizeof(Shared)) != 0)) {
            std::perror(path);
            std::abort();
        }
        const int flags = path ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
        void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, flags, file, 0);
        return memory == MAP_FAILED ? (std::abort(), nullptr) : static_cast<Shared*>(memory);
    }();
    return mapped;
}

int capability() { return shared()->capability ? static_cast<int>(shared()->capability) : 80; }
uint64_t memory_bytes() { return shared()->memory_bytes ? shared()->memory_bytes : uint64_t{1} << 30; }

std::mutex lock;
using Guard = std::lock_guard<std::mutex>;

[[gnu::format(printf, 1, 2)]] void wrong(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(shared()->error, sizeof shared()->error, format, arguments);
    va_end(arguments);
    shared()->errors++;
}

// ---- Memory ----

// Addresses for allocations; those of a freed one are not used again, and a page that nobody may touch follows each.
constexpr uint64_t arena_bytes = uint64_t{1} << 44;
constexpr uint64_t page = 4096;

struct Memory {
    uint64_t start = reserve(), next = start;
    std::map<uint64_t, uint64_t> live;  // bytes by address

    static uint64_t reserve() {
        void* all = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return all == MAP_FAILED ? (std::perror("fake CUDA driver: mmap"), std::abort(), 0) : uint64_t(all);
    }

    bool is_device(uint64_t at) const { return start <= at && at < start + arena_bytes; }

    // Whether `bytes` from `at` on lie within one allocation.
    bool holds(uint64_t at, uint64_t bytes) const {
        auto after = live.upper_bound(at);
        if (after == live.begin()) return false;
        const auto& [first, size] = *std::prev(after);
        return at - first <= size && bytes <= size - (at - first);
    }

    CUresult allocate(uint64_t* at, uint64_t bytes) {
        if (bytes == 0) return wrong("allocation of no bytes"), CUDA_ERROR_INVALID_VALUE;
        if (shared()->live_bytes + bytes > memory_bytes()) return shared()->refusals++, CUDA_ERROR_OUT_OF_MEMORY;
        const uint64_t pages = (bytes + page - 1) / page * page;
        if (next + pages + page > start + arena_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
        if (mprotect(reinterpret_cast<void*>(next), pages, PROT_READ | PROT_WRITE) != 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
        *at = next;
        live[next] = bytes;
        next += pages + page;
        shared()->allocations++;
        shared()->live_bytes += bytes;
        shared()->pooled_bytes -= std::min(shared()->pooled_bytes, bytes);
        return CUDA_SUCCESS;
    }

    CUresult release(uint64_t at) {
        const auto found = live.find(at);
        if (found == live.end()) return wrong("free of %#lx, which is not allocated", at), CUDA_ERROR_INVALID_VALUE;
        shared()->frees++;
        shared()->live_bytes -= found->second;
        shared()->pooled_bytes = std::min(shared()->pooled_bytes + found->second, shared()->threshold);
        const uint64_t pages = (found->second + page - 1) / page * page;
        mmap(reinterpret_cast<void*>(at), pages, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        live.erase(found);
        return CUDA_SUCCESS;
    }

    CUresult check(const char* what, uint64_t at, uint64_t bytes) const {
        if (holds(at, bytes)) return CUDA_SUCCESS;
        return wrong("%s: %lu bytes at %#lx are not within an allocation", what, bytes, at), CUDA_ERROR_INVALID_VALUE;
    }
};

Memory& memory() {
    static Memory one;
    return one;
}

thread_local CUcontext current = nullptr;

CUresult allocate(CUdeviceptr* at, size_t bytes) {
    if (!current) return wrong("allocation on a thread without a context"), CUDA_ERROR_INVALID_CONTEXT;
    Guard guard(lock);
    uint64_t address = 0;
    const CUresult result = memory().allocate(&address, bytes);
    *at = address;
    return result;
}

CUresult release(CUdeviceptr at) {
    Guard guard(lock);
    return memory().release(at);
}

CUresult upload(CUdeviceptr to, const void* from, size_t bytes) {
    Guard guard(lock);
    shared()->uploads++;
    shared()->uploaded_bytes += bytes;
    const CUresult result = memory().check("upload", to, bytes);
    if (result == CUDA_SUCCESS) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return result;
}

CUresult download(void* to, CUdeviceptr from, size_t bytes) {
    Guard guard(lock);
    shared()->downloads++;
    shared()->downloaded_bytes += bytes;
    const CUresult result = memory().check("download", from, bytes);
    if (result == CUDA_SUCCESS) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return result;
}

CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    Guard guard(lock);
    shared()->copies++;
    shared()->copied_bytes += bytes;
    const CUresult source = memory().check("source of a copy", from, bytes);
    const CUresult target = memory().check("target of a copy", to, bytes);
    if (source != CUDA_SUCCESS || target != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return CUDA_SUCCESS;
}

CUresult fill(CUdeviceptr at, unsigned char value, size_t bytes) {
    Guard guard(lock);
    shared()->fills++;
    const CUresult result = memory().check("fill", at, bytes);
    if (result == CUDA_SUCCESS) std::memset(reinterpret_cast<void*>(at), value, bytes);
    return result;
}

CUresult synchronise() {
    Guard guard(lock);
    shared()->synchronisations++;
    return CUDA_SUCCESS;
}

// ---- Kernels ----

struct FatBinary;

struct Kernel {
    std::string name;
    const FatBinary* binary = nullptr;  // of kernels that nvcc's objects registered
    std::vector<size_t> parameters;  // bytes of each, for kernels of PTX
    int shared_bytes = 48 << 10;  // of dynamic shared memory, at most
};

struct Module {
    std::unordered_map<std::string, Kernel> kernels;
};

// Blocks of 8.0 may have that much, once it is asked for by an attribute.
constexpr int shared_bytes_most = 163 << 10;

// Counts a launch and says what is wrong with it.
CUresult launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes) {
    shared()->launches++;
    for (auto& counted : shared()->kernels) {
        if (counted.name[0] == 0) kernel.name.copy(counted.name, sizeof counted.name - 1);
        if (kernel.name.compare(0, sizeof counted.name - 1, counted.name) != 0) continue;
        counted.launches++;
        break;
    }
    const char* name = kernel.name.c_str();
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    const auto within = [](unsigned number, unsigned most) { return 0 < number && number <= most; };
    if (!within(grid.x, INT32_MAX) || !within(grid.y, UINT16_MAX) || !within(grid.z, UINT16_MAX))
        return wrong("%s: grid %u × %u × %u", name, grid.x, grid.y, grid.z), CUDA_ERROR_INVALID_VALUE;
    if (threads == 0 || threads > 1024 || block.z > 64)
        return wrong("%s: block %u × %u × %u", name, block.x, block.y, block.z), CUDA_ERROR_INVALID_VALUE;
    if (shared_bytes > static_cast<size_t>(kernel.shared_bytes))
        return wrong("%s: %zu bytes of shared memory", name, shared_bytes), CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

// Every aligned word of the arguments that is an address of the device must be one of a live allocation.
CUresult check_arguments(const Kernel& kernel, void** arguments) {
    for (size_t index = 0; index < kernel.parameters.size(); index++) {
        for (size_t at = 0; at + 8 <= kernel.parameters[index]; at += 8) {
            uint64_t word;
            std::memcpy(&word, static_cast<const char*>(arguments[index]) + at, 8);
            if (!memory().is_device(word) || memory().holds(word, 0)) continue;
            wrong("%s: argument %zu points to memory that is not allocated", kernel.name.c_str(), index);
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    }
    return CUDA_SUCCESS;
}

// Bytes of a parameter as PTX declares it: `.param .u64 name`, `.param .align 8 .b8 name[24]`.
size_t parameter_bytes(const std::string& declaration) {
    const size_t array = declaration.find('[');
    if (array != std::string::npos) return std::strtoul(declaration.c_str() + array + 1, nullptr, 10);
    for (const auto& [type, bytes] : {std::pair{"64 ", 8}, {"32 ", 4}, {"16 ", 2}})
        if (declaration.find(type) != std::string::npos) return bytes;
    return 1;
}

// The entries of a module's PTX with their parameters.
Module parse_ptx(const std::string& ptx) {
    Module module;
    const std::string entry = ".entry ";
    for (size_t at = ptx.find(entry); at != std::string::npos; at = ptx.find(entry, at)) {
        at += entry.size();
        const size_t open = ptx.find('(', at), close = ptx.find(')', open), body = ptx.find('{', at);
        const bool has_parameters = open < body;
        std::string name = ptx.substr(at, (has_parameters ? open : body) - at);
        name.erase(std::find_if(name.begin(), name.end(), isspace), name.end());
        Kernel& kernel = module.kernels[name];
        kernel.name = name;
        size_t from = open;
        while (has_parameters && (from = ptx.find(".param", from)) < close) {
            const size_t end = std::min(ptx.find(',', from), close);
            kernel.parameters.push_back(parameter_bytes(ptx.substr(from, end - from) + ' '));
            from = end;
        }
    }
    return module;
}

// Kernels of nvcc's objects, by the address of their stub on the host.
std::unordered_map<const void*, Kernel>& registered() {
    static std::unordered_map<const void*, Kernel> one;
    return one;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t runtime(CUresult result) {
    if (result == CUDA_SUCCESS) return cudaSuccess;
    // Both enumerations number these alike.
    return last_error = static_cast<cudaError_t>(result);
}

// What an object's fat binary holds: PTX or machine code, each for one capability. The format is not documented; the
// fields are those that `cuobjdump --list-elf` shows.
struct FatBinary {
    struct Wrapper {
        uint32_t magic, version;
        const char* data;
        const void* file;
    };
    struct Header {
        uint32_t magic;
        uint16_t version, bytes;
        uint64_t size;
    };
    struct Part {
        uint16_t kind, version;  // 1 is PTX, 2 machine code
        uint32_t header_bytes;
        uint64_t size;
        uint32_t unknown[3], capability;
    };
    static constexpr uint32_t MAGIC = 0xba55ed50;
    std::vector<std::pair<bool, int>> parts;  // whether it is PTX, and its capability
    std::string ptx;                          // of the last such part, if it is not compressed

    explicit FatBinary(const char* data) {
        Header header;
        std::memcpy(&header, data, sizeof header);
        const char* at = data + header.bytes;
        const char* end = at + header.size;
        while (at < end) {
            Part part;
            std::memcpy(&part, at, sizeof part);
            parts.emplace_back(part.kind == 1, part.capability);
            if (part.kind == 1) ptx.assign(at + part.header_bytes, part.size);
            at += part.header_bytes + part.size;
        }
    }

    // PTX runs on later devices, machine code on those of the same major number.
    bool fits(int device) const {
        return std::any_of(parts.begin(), parts.end(), [device](const auto& part) {
            const auto [is_ptx, capability] = part;
            return capability <= device && (is_ptx || capability / 10 == device / 10);
        });
    }
};

// ---- Products ----

int element_bytes(cudaDataType_t type) {
    switch (type) {
        case CUDA_R_64F: return 8;
        case CUDA_R_32F: return 4;
        case CUDA_R_16F:
        case CUDA_R_16BF: return 2;
        default: return wrong("product of type %d", type), 0;
    }
}

struct Matrix {
    const void* data;
    cudaDataType_t type;
    int rows, columns, leading;
    long long stride;
};

// Column-major matrices as they are stored: transposed ones before transposition.
cublasStatus_t product(const char* name, int batch, int depth, std::initializer_list<Matrix> matrices) {
    Guard guard(lock);
    shared()->products++;
    Kernel kernel;
    kernel.name = name;
    launch(kernel, 1, 1, 0);
    for (const Matrix& matrix : matrices) {
        const auto [data, type, rows, columns, leading, stride] = matrix;
        if (rows < 1 || columns < 1 || depth < 1 || batch < 1 || leading < rows) {
            wrong("%s: %d × %d, leading dimension %d, depth %d, batch %d", name, rows, columns, leading, depth, batch);
            return CUBLAS_STATUS_INVALID_VALUE;
        }
        const uint64_t elements = stride * (batch - 1) + uint64_t(leading) * (columns - 1) + rows;
        const uint64_t bytes = elements * element_bytes(type);
        if (memory().check(name, reinterpret_cast<uint64_t>(data), bytes) != CUDA_SUCCESS)
            return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

Matrix stored(const void* data, cudaDataType_t type, cublasOperation_t operation, int rows, int columns, int leading,
              long long stride) {
    if (operation != CUBLAS_OP_N) std::swap(rows, columns);
    return {data, type, rows, columns, leading, stride};
}

// How cublasLt is told to multiply.
struct Description {
    cublasOperation_t left = CUBLAS_OP_N;
};

// What an algorithm is found for, in words.
void shape(uint64_t* words, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c) {
    for (const auto layout : {a, b, c}) {
        const Matrix& matrix = *reinterpret_cast<const Matrix*>(layout);
        *words++ = uint64_t(matrix.rows) << 32 | uint64_t(matrix.columns);
        *words++ = uint64_t(matrix.leading) << 8 | uint64_t(matrix.type);
    }
}

// A handle that is one byte of its own.
template <typename Handle>
void make(Handle* handle) { *handle = reinterpret_cast<Handle>(new char); }
template <typename Handle>
void unmake(Handle handle) { delete reinterpret_cast<char*>(handle); }

}  // namespace

extern "C" {

// ---- libcuda ----

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return *device = ordinal, ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = memory_bytes(), CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int length, CUdevice) { return std::snprintf(name, length, "fake"), CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 108; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_bytes_most; break;
        default: return wrong("device attribute %d", attribute), CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    static char primary;
    return *context = reinterpret_cast<CUcontext>(&primary), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return synchronise(); }

CUresult cuStreamCreate(CUstream* stream, unsigned) { return make(stream), CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream stream) { return unmake(stream), CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream) { return synchronise(); }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return shared()->events++, CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent* event, unsigned) { return shared()->events++, make(event), CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent, CUstream) { return shared()->events++, CUDA_SUCCESS; }
CUresult cuEventSynchronize(CUevent) { return synchronise(); }
CUresult cuEventDestroy(CUevent event) { return unmake(event), CUDA_SUCCESS; }

CUresult cuMemGetInfo(size_t* free, size_t* total) {
    Guard guard(lock);
    *total = memory_bytes();
    *free = *total - std::min<uint64_t>(*total, shared()->live_bytes + shared()->pooled_bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* at, size_t bytes) { return allocate(at, bytes); }
CUresult cuMemAllocAsync(CUdeviceptr* at, size_t bytes, CUstream) { return allocate(at, bytes); }
CUresult cuMemFree(CUdeviceptr at) { return release(at); }
CUresult cuMemFreeAsync(CUdeviceptr at, CUstream) { return release(at); }
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) { return upload(to, from, bytes); }
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) { return upload(to, from, bytes); }
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { return download(to, from, bytes); }
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) { return download(to, from, bytes); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy(to, from, bytes); }
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) { return copy(to, from, bytes); }
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream) { return fill(at, value, bytes); }

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice) {
    static char one;
    return *pool = reinterpret_cast<CUmemoryPool>(&one), CUDA_SUCCESS;
}
CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }
CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute attribute, void* value) {
    if (attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        return wrong("pool attribute %d", attribute), CUDA_ERROR_INVALID_VALUE;
    std::memcpy(&shared()->threshold, value, 8);
    return CUDA_SUCCESS;
}
CUresult cuMemPoolTrimTo(CUmemoryPool, size_t bytes) {
    Guard guard(lock);
    return shared()->pooled_bytes = std::min<uint64_t>(shared()->pooled_bytes, bytes), CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
    const char* data = static_cast<const char*>(image);
    uint32_t magic;
    std::memcpy(&magic, data, sizeof magic);
    std::string ptx;
    if (magic == FatBinary::MAGIC) {
        const FatBinary binary(data);
        if (!binary.fits(capability()))
            return wrong("kernels that no %d runs", capability()), CUDA_ERROR_NO_BINARY_FOR_GPU;
        ptx = binary.ptx;
    } else {
        ptx = data;
    }
    const size_t target = ptx.find(".target sm_");
    if (target == std::string::npos) return wrong("a module that is not PTX"), CUDA_ERROR_INVALID_IMAGE;
    const int least = std::atoi(ptx.c_str() + target + std::strlen(".target sm_"));
    if (least > capability()) return wrong("PTX for sm_%d on %d", least, capability()), CUDA_ERROR_NO_BINARY_FOR_GPU;
    Guard guard(lock);
    *handle = reinterpret_cast<CUmodule>(new Module(parse_ptx(ptx)));
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule handle) { return delete reinterpret_cast<Module*>(handle), CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
    Guard guard(lock);
    auto& kernels = reinterpret_cast<Module*>(handle)->kernels;
    const auto found = kernels.find(name);
    if (found == kernels.end()) return wrong("no kernel %s in the module", name), CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(&found->second);
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    if (value > shared_bytes_most) return wrong("%d bytes of shared memory", value), CUDA_ERROR_INVALID_VALUE;
    reinterpret_cast<Kernel*>(function)->shared_bytes = value;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream, void** arguments, void**) {
    Guard guard(lock);
    const Kernel& kernel = *reinterpret_cast<Kernel*>(function);
    const CUresult result = launch(kernel, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes);
    return result == CUDA_SUCCESS ? check_arguments(kernel, arguments) : result;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    switch (error) {
        case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case CUDA_ERROR_INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
        case CUDA_ERROR_NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
        case CUDA_ERROR_NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
        case CUDA_ERROR_ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
        default: *name = "another CUDA error";
    }
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
    return shared()->error[0] ? (*text = shared()->error, CUDA_SUCCESS) : cuGetErrorName(error, text);
}

// ---- libcudart: what nvcc's objects and mistralrs' launchers call ----

void** __cudaRegisterFatBinary(void* wrapper) {
    return reinterpret_cast<void**>(new FatBinary(static_cast<const FatBinary::Wrapper*>(wrapper)->data));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** binary) { delete reinterpret_cast<FatBinary*>(binary); }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
    int status;
    char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    Kernel kernel;
    kernel.name = plain ? plain : name;
    std::free(plain);
    kernel.name.resize(std::min(kernel.name.size(), kernel.name.find('(')));
    kernel.binary = reinterpret_cast<FatBinary*>(binary);
    registered()[host] = kernel;
}

struct Configuration {
    dim3 grid, block;
    size_t shared_bytes;
    void* stream;
};
static thread_local std::vector<Configuration> configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
    return configurations.push_back({grid, block, shared_bytes, stream}), 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    const Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid, *block = last.block, *shared_bytes = last.shared_bytes;
    *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* host) {
    Guard guard(lock);
    const auto found = registered().find(host);
    if (found == registered().end()) {
        wrong("a kernel that no object registered");
        return last_error = cudaErrorInvalidDeviceFunction;
    }
    *handle = reinterpret_cast<cudaKernel_t>(&found->second);
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t) {
    Guard guard(lock);
    const Kernel& kernel = *reinterpret_cast<const Kernel*>(handle);
    if (!kernel.binary->fits(capability())) {
        wrong("%s has no code for this device", kernel.name.c_str());
        return last_error = cudaErrorNoKernelImageForDevice;
    }
    return runtime(launch(kernel, grid, block, shared_bytes));
}
// The same on the stream of the calling thread: objects compiled with --default-stream per-thread.
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t handle, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                    cudaStream_t stream) {
    return __cudaLaunchKernel(handle, grid, block, arguments, shared_bytes, stream);
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
    cudaKernel_t handle;
    if (const cudaError_t error = __cudaGetKernel(&handle, host); error != cudaSuccess) return error;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value > shared_bytes_most) return wrong("%d bytes of shared memory", value), last_error = cudaErrorInvalidValue;
    reinterpret_cast<Kernel*>(handle)->shared_bytes = value;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t) { return shared()->error; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    // Both enumerations number attributes alike.
    return runtime(cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device));
}

// ---- libcublas, libcublasLt, libcurand ----

cublasStatus_t cublasCreate(cublasHandle_t* handle) { return make(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy(cublasHandle_t handle) { return unmake(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const void*, const void* a,
    cudaDataType a_type, int lda, long long a_stride, const void* b, cudaDataType b_type, int ldb, long long b_stride,
    const void*, void* c, cudaDataType c_type, int ldc, long long c_stride, int batch, cublasComputeType_t,
    cublasGemmAlgo_t) {
    return product("cublasGemmStridedBatchedEx", batch, k,
                   {stored(a, a_type, left, m, k, lda, a_stride), stored(b, b_type, right, k, n, ldb, b_stride),
                    stored(c, c_type, CUBLAS_OP_N, m, n, ldc, c_stride)});
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return make(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return unmake(handle), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
    const Matrix matrix{nullptr, type, int(rows), int(columns), int(leading), 0};
    return *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Matrix(matrix)), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return delete reinterpret_cast<Matrix*>(layout), CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t, cudaDataType_t) {
    return *description = reinterpret_cast<cublasLtMatmulDesc_t>(new Description), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    return delete reinterpret_cast<Description*>(description), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    if (attribute != CUBLASLT_MATMUL_DESC_TRANSA || bytes != sizeof(cublasOperation_t))
        return wrong("attribute %d of a product", attribute), CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&reinterpret_cast<Description*>(description)->left, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return make(preference), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return unmake(preference), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

// The algorithm of a shape is the shape: another product cannot have it.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t results[], int* count) {
    Guard guard(lock);
    shared()->lookups++;
    results[0] = {};
    results[0].state = CUBLAS_STATUS_SUCCESS;
    shape(results[0].algo.data, a, b, c);
    return *count = 1, CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void*, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void*, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* scratch,
                              size_t scratch_bytes, cudaStream_t) {
    uint64_t expected[8] = {};
    shape(expected, a_layout, b_layout, c_layout);
    if (std::memcmp(expected, algorithm->data, sizeof expected) != 0)
        return wrong("cublasLtMatmul: the algorithm of another shape"), CUBLAS_STATUS_INVALID_VALUE;
    if (memory().check("cublasLtMatmul", reinterpret_cast<uint64_t>(scratch), scratch_bytes) != CUDA_SUCCESS)
        return CUBLAS_STATUS_INVALID_VALUE;
    const auto placed = [](const void* data, cublasLtMatrixLayout_t layout) {
        Matrix matrix = *reinterpret_cast<Matrix*>(layout);
        matrix.data = data;
        return matrix;
    };
    const Matrix left = placed(a, a_layout), right = placed(b, b_layout), result = placed(d, d_layout);
    const bool transposed = reinterpret_cast<Description*>(description)->left == CUBLAS_OP_T;
    const int rows = transposed ? left.columns : left.rows, depth = transposed ? left.rows : left.columns;
    if (rows != result.rows || depth != right.rows || right.columns != result.columns || c != d)
        return wrong("cublasLtMatmul: shapes that do not fit"), CUBLAS_STATUS_INVALID_VALUE;
    return product("cublasLtMatmul", 1, depth, {left, right, result});
}

// candle makes a generator with its device.
curandStatus_t curandCreateGenerator(curandGenerator_t* generator, curandRngType_t) {
    return make(generator), CURAND_STATUS_SUCCESS;
}
curandStatus_t curandDestroyGenerator(curandGenerator_t generator) { return unmake(generator), CURAND_STATUS_SUCCESS; }
curandStatus_t curandSetPseudoRandomGeneratorSeed(curandGenerator_t, unsigned long long) {
    return CURAND_STATUS_SUCCESS;
}
curandStatus_t curandSetStream(curandGenerator_t, cudaStream_t) { return CURAND_STATUS_SUCCESS; }

}  // extern "C"
