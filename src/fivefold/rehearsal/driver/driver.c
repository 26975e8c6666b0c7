/* A stand-in for the CUDA driver and runtime, cuBLAS and NCCL, on a machine without a GPU.

   It is loaded before NVIDIA's libraries (LD_PRELOAD). Memory is address space: what is allocated is counted against
   the memory of a chip, and pages appear only where something is copied. Kernels and collectives never run; they are
   counted. Small copies are really made, so that the host reads back what the host wrote.

   `stand_in.py` compiles this file with `others.c`, which has a function that returns 0 (success) for every other name
   that the installed torch takes from those libraries.

   The types are those of the installed CUDA (`driver_types.h`); functions are declared by their ABI alone, for their
   prototypes differ between CUDA 12 and 13. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
typedef uint64_t handle;

/* ---- the chip ---------------------------------------------------------------------------------------------------- */

static struct {
  char name[128];
  size_t memory;
  int devices, sms, major, minor, shared; /* shared: bytes of shared memory of one SM */
} chip = {"NVIDIA stand-in", (size_t)80 << 30, 8, 132, 9, 0, 233472};

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

static size_t used; /* of the memory; the context of CUDA is there first */

static void __attribute__((constructor)) begin(void) {
  used = number("FIVEFOLD_CHIP_CONTEXT", 0);
  const char *name = getenv("FIVEFOLD_CHIP_NAME");
  if (name) snprintf(chip.name, sizeof chip.name, "%s", name);
  chip.memory = number("FIVEFOLD_CHIP_MEMORY", chip.memory);
  chip.devices = number("FIVEFOLD_CHIP_DEVICES", chip.devices);
  chip.sms = number("FIVEFOLD_CHIP_SMS", chip.sms);
  chip.major = number("FIVEFOLD_CHIP_MAJOR", chip.major);
  chip.minor = number("FIVEFOLD_CHIP_MINOR", chip.minor);
  chip.shared = number("FIVEFOLD_CHIP_SHARED", chip.shared);
}

/* By the numbers of `enum cudaDeviceAttr`, which are those of CUdevice_attribute. */
static int attribute(int which) {
  switch (which) {
  case 1: case 2: case 3: return 1024;      /* threads of a block, and its first two sides */
  case 4: return 64;                        /* its third side */
  case 5: return 2147483647;                /* blocks of a grid */
  case 6: case 7: return 65535;
  case 8: return 49152;                     /* shared memory of a block, unless it asks for more */
  case 10: return 32;                       /* threads of a warp */
  case 12: case 82: return 65536;           /* registers */
  case 13: return 1980000;                  /* clock, kHz */
  case 16: return chip.sms;
  case 36: return 2619000;                  /* memory clock, kHz */
  case 37: return 5120;                     /* memory bus, bits */
  case 38: return 50 << 20;                 /* L2 cache */
  case 39: return 2048;                     /* threads of an SM */
  case 75: return chip.major;
  case 76: return chip.minor;
  case 81: return chip.shared;
  case 97: return chip.shared - 1024;       /* what a block may ask for */
  case 106: return 32;                      /* blocks of an SM */
  case 128: case 132: return 0;             /* fabric handles, multicast: not between stand-ins */
  default: return 1;
  }
}

static __thread int device = 0, last_error = 0;

int cudaGetDeviceCount(int *count) { return *count = chip.devices, OK; }
int cudaGetDevice(int *out) { return *out = device, OK; }
int cudaSetDevice(int chosen) { return device = chosen, OK; }
int cudaDriverGetVersion(int *version) { return *version = CUDART, OK; }
int cudaRuntimeGetVersion(int *version) { return *version = CUDART, OK; }
int cudaDeviceCanAccessPeer(int *can) { return *can = 1, OK; }
int cudaDeviceGetAttribute(int *value, int which) { return *value = attribute(which), OK; }
int cudaDeviceGetPCIBusId(char *text, int size, int of) { return snprintf(text, size, "0000:%02x:00.0", of), OK; }
int cudaGetLastError(void) { int error = last_error; return last_error = OK, error; }
int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in"; }
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "stand-in"; }

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}

int cudaGetDeviceProperties(struct cudaDeviceProp *out, int of) {
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%s", chip.name);
  out->totalGlobalMem = chip.memory;
  out->major = chip.major;
  out->minor = chip.minor;
  out->multiProcessorCount = chip.sms;
  out->warpSize = attribute(10);
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = attribute(1);
  out->maxThreadsDim[2] = attribute(4);
  out->maxGridSize[0] = attribute(5);
  out->maxGridSize[1] = out->maxGridSize[2] = attribute(6);
  out->sharedMemPerBlock = attribute(8);
  out->sharedMemPerBlockOptin = attribute(97);
  out->sharedMemPerMultiprocessor = attribute(81);
  out->regsPerBlock = out->regsPerMultiprocessor = attribute(12);
  out->maxThreadsPerMultiProcessor = attribute(39);
  out->maxBlocksPerMultiProcessor = attribute(106);
  out->l2CacheSize = attribute(38);
  out->memoryBusWidth = attribute(37);
  out->textureAlignment = 512;
  out->pciBusID = of;
  out->unifiedAddressing = out->concurrentKernels = 1;
  out->asyncEngineCount = 3;
  for (int i = 0; i < 16; i++) out->uuid.bytes[i] = of + i;
  return OK;
}
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *out, int of) { return cudaGetDeviceProperties(out, of); }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

#define COPIED ((size_t)1 << 20) /* copies up to here are made */
#define ROUND ((size_t)2 << 20)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *arena;
static size_t room, top;

static int is_device(const void *at) { return arena && (const char *)at >= arena && (const char *)at < arena + room; }

/* Address space that nothing else has; NULL where there is no more. */
static void *addresses(size_t size) {
  pthread_mutex_lock(&lock);
  for (room = room ? room : (size_t)1 << 45; !arena && room > chip.memory; room /= 2) {
    void *found = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found != MAP_FAILED) { arena = found; break; }
  }
  size = (size + ROUND - 1) / ROUND * ROUND;
  void *at = arena && top + size <= room ? arena + top : NULL;
  top += at ? size : 0;
  pthread_mutex_unlock(&lock);
  return at;
}

static int take(size_t size) {
  pthread_mutex_lock(&lock);
  int fits = used + size <= chip.memory;
  used += fits ? size : 0;
  pthread_mutex_unlock(&lock);
  return fits;
}

static void give(size_t size) {
  pthread_mutex_lock(&lock);
  used -= size;
  pthread_mutex_unlock(&lock);
}

/* The sizes of allocations, by address: open addressing, and a place that was given back is taken again. */
#define PLACES (1 << 20)
static struct { void *at; size_t size; } sizes[PLACES];

static size_t place_of(void *at, void *wanted) {
  size_t place = ((uintptr_t)at >> 12) * 2654435761u % PLACES;
  while (sizes[place].at && sizes[place].at != wanted) place = (place + 1) % PLACES;
  return place;
}

static void note_size(void *at, size_t size) {
  pthread_mutex_lock(&lock);
  size_t place = place_of(at, (void *)-1);
  sizes[place].at = at;
  sizes[place].size = size;
  pthread_mutex_unlock(&lock);
}

/* 0 where nothing was noted. */
static size_t forget_size(void *at) {
  pthread_mutex_lock(&lock);
  size_t place = place_of(at, at), size = sizes[place].at ? sizes[place].size : 0;
  if (size) sizes[place].at = (void *)-1;
  pthread_mutex_unlock(&lock);
  return size;
}

static int refused(void **out) { return *out = NULL, last_error = OUT_OF_MEMORY; }

int cudaMalloc(void **out, size_t size) {
  size = (size + ROUND - 1) / ROUND * ROUND;
  if (!take(size)) return refused(out);
  if (!(*out = addresses(size))) return give(size), refused(out);
  note_size(*out, size);
  return OK;
}

int cudaFree(void *at) {
  size_t size = at ? forget_size(at) : 0;
  if (size) madvise(at, size, MADV_DONTNEED), give(size);
  return OK;
}

int cudaMallocAsync(void **out, size_t size) { return cudaMalloc(out, size); }
int cudaFreeAsync(void *at) { return cudaFree(at); }
int cudaMemGetInfo(size_t *unused, size_t *total) { return *unused = chip.memory - used, *total = chip.memory, OK; }

int cudaHostAlloc(void **out, size_t size) {
  *out = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) return refused(out);
  note_size(*out, size);
  return OK;
}

int cudaFreeHost(void *at) {
  size_t size = at ? forget_size(at) : 0;
  if (size) munmap(at, size);
  return OK;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at) {
  memset(out, 0, sizeof *out);
  out->type = is_device(at) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  out->devicePointer = (void *)at;
  return OK;
}

/* Segments that grow (expandable_segments): addresses first, then memory, mapped where it is wanted. */
struct block { size_t size; };
int cuMemGetAllocationGranularity(size_t *out) { return *out = ROUND, OK; }
int cuMemAddressReserve(handle *out, size_t size) { return (*out = (handle)addresses(size)) ? OK : OUT_OF_MEMORY; }
int cuMemCreate(handle *out, size_t size) {
  if (!take(size)) return OUT_OF_MEMORY;
  struct block *made = malloc(sizeof *made);
  made->size = size;
  return *out = (handle)made, OK;
}
int cuMemRelease(handle of) { return give(((struct block *)of)->size), free((void *)of), OK; }
int cuMemUnmap(handle at, size_t size) { return madvise((void *)at, size, MADV_DONTNEED), OK; }

/* ---- what the host asks for -------------------------------------------------------------------------------------- */

enum { LAUNCH, RECORD, WAIT, COLLECTIVE };
enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, SEND, RECV, ALL_TO_ALL };
struct entry { int32_t what, kind; handle stream, object; int64_t bytes, group; };

static long launched, syncs, copies_in, copies_out;
static struct entry *entries;
static long noted, most;
static int is_noting;
static void (*heard)(void);

/* For Python: what was counted since the process began. */
long rehearsal_count(int which) { return which == 0 ? launched : which == 1 ? syncs : which == 2 ? copies_in : copies_out; }
size_t rehearsal_used(void) { return used; }
/* `call` is called where the host waits for the device. */
void rehearsal_on_sync(void (*call)(void)) { heard = call; }
void rehearsal_note(int on) { if ((is_noting = on)) noted = 0; }
const struct entry *rehearsal_entries(long *count) { return *count = noted, entries; }

static void note(int what, int kind, handle stream, handle object, int64_t bytes, int64_t group) {
  if (!is_noting) return;
  pthread_mutex_lock(&lock);
  if (noted == most) {
    most = most ? 2 * most : 1 << 16;
    entries = realloc(entries, most * sizeof *entries);
  }
  entries[noted++] = (struct entry){what, kind, stream, object, bytes, group};
  pthread_mutex_unlock(&lock);
}

/* While a CUDA graph is captured, kernels become its nodes; to launch the graph is one launch. */
static handle capture; /* the one under way; 0: none. Other threads do not launch meanwhile. */
static size_t captured;

static int launch(handle stream) {
  if (capture) return captured++, OK;
  __sync_fetch_and_add(&launched, 1);
  note(LAUNCH, 0, stream, 0, 0, 0);
  return OK;
}

static int synchronized(void) {
  __sync_fetch_and_add(&syncs, 1);
  if (heard) heard();
  return OK;
}

int cudaStreamSynchronize(void) { return synchronized(); }
int cudaDeviceSynchronize(void) { return synchronized(); }
int cudaEventSynchronize(void) { return synchronized(); }

int cudaMemcpyAsync(void *to, const void *from, size_t size) {
  int goes_out = !is_device(to) && is_device(from), comes_in = is_device(to) && !is_device(from);
  if (goes_out) __sync_fetch_and_add(&copies_out, 1);
  if (comes_in) __sync_fetch_and_add(&copies_in, 1);
  if (size <= COPIED) memmove(to, from, size);
  return OK;
}
int cudaMemcpy(void *to, const void *from, size_t size) { return cudaMemcpyAsync(to, from, size), synchronized(); }
int cudaMemsetAsync(void *at, int value, size_t size) { return size <= COPIED ? memset(at, value, size) : 0, OK; }
int cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size); }

/* ---- streams and events ------------------------------------------------------------------------------------------ */

static handle fresh(void) {
  static handle last = 0x1000;
  return __sync_add_and_fetch(&last, 16);
}
int cudaStreamCreate(handle *out) { return *out = fresh(), OK; }
int cudaStreamCreateWithFlags(handle *out) { return *out = fresh(), OK; }
int cudaStreamCreateWithPriority(handle *out) { return *out = fresh(), OK; }
int cudaStreamGetPriority(handle stream, int *out) { return *out = 0, OK; }
int cudaEventCreate(handle *out) { return *out = fresh(), OK; }
int cudaEventCreateWithFlags(handle *out) { return *out = fresh(), OK; }
int cudaEventRecord(handle event, handle stream) { return note(RECORD, 0, stream, event, 0, 0), OK; }
int cudaEventRecordWithFlags(handle event, handle stream) { return cudaEventRecord(event, stream); }
int cudaStreamWaitEvent(handle stream, handle event) { return note(WAIT, 0, stream, event, 0, 0), OK; }
int cudaEventElapsedTime(float *milliseconds) { return *milliseconds = 1, OK; }
int cudaEventElapsedTime_v2(float *milliseconds) { return *milliseconds = 1, OK; }

/* ---- CUDA graphs ------------------------------------------------------------------------------------------------- */

int cudaStreamBeginCapture(void) { return captured = 0, capture = fresh(), OK; }
int cudaStreamEndCapture(handle stream, handle *graph) { return *graph = capture, capture = 0, OK; }
int cudaStreamIsCapturing(handle stream, int *out) { return *out = !!capture, OK; }
static int capture_info(int *status, unsigned long long *id, handle *graph, size_t *count) {
  if (status) *status = !!capture;
  if (id) *id = capture;
  if (graph) *graph = capture;
  if (count) *count = 0;
  return OK;
}
#if CUDART >= 13000
int cudaStreamGetCaptureInfo(
    handle stream, int *status, unsigned long long *id, handle *graph, const void **from, const void **edges,
    size_t *count) {
  return capture_info(status, id, graph, count);
}
#else
int cudaStreamGetCaptureInfo(handle stream, int *status, unsigned long long *id) {
  return capture_info(status, id, 0, 0);
}
#endif
int cudaStreamGetCaptureInfo_v2(
    handle stream, int *status, unsigned long long *id, handle *graph, const void **from, size_t *count) {
  return capture_info(status, id, graph, count);
}
int cudaGraphGetNodes(handle graph, void *nodes, size_t *count) { return *count = captured, OK; }
int cudaGraphInstantiateWithFlags(handle *out, handle graph) { return *out = graph, OK; }
int cudaGraphLaunch(handle graph, handle stream) { return launch(stream); }

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static void *fat_binary[4];
void **__cudaRegisterFatBinary(void) { return fat_binary; }
void __cudaRegisterFatBinaryEnd(void) {}
void __cudaUnregisterFatBinary(void) {}
char __cudaInitModule(void) { return 1; }

struct size { unsigned x, y, z; };
static __thread handle pushed;
unsigned __cudaPushCallConfiguration(struct size grid, struct size block, size_t shared, handle stream) {
  return pushed = stream, 0;
}
int __cudaPopCallConfiguration(struct size *grid, struct size *block, size_t *shared, handle *stream) {
  *grid = *block = (struct size){1, 1, 1};
  *shared = 0;
  *stream = pushed;
  return OK;
}
int __cudaGetKernel(handle *out, const void *function) { return *out = (handle)function, OK; }
int cudaLaunchKernel(const void *of, struct size grid, struct size block, void **with, size_t shared, handle stream) {
  return launch(stream);
}
int __cudaLaunchKernel(handle of, struct size grid, struct size block, void **with, size_t shared, handle stream) {
  return launch(stream);
}
int cudaLaunchKernelExC(const cudaLaunchConfig_t *how) { return launch((handle)how->stream); }
int cudaGetSymbolAddress(void **out) { return (*out = addresses(ROUND)) ? OK : OUT_OF_MEMORY; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *out) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = attribute(1);
  out->numRegs = 32;
  /* Of the kernels that torch brings, those that run here: 8.0, 8.6, 9.0, 10.0. An 8.9 runs those of 8.6. */
  out->ptxVersion = out->binaryVersion = 10 * chip.major + (chip.major == 8 && chip.minor >= 6 ? 6 : 0);
  out->maxDynamicSharedSizeBytes = attribute(97);
  return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out) { return *out = 2, OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out) { return *out = 2, OK; }

/* ---- the driver, as torch and Triton ask for it -------------------------------------------------------------------- */

static int success(void) { return OK; }

int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, uint64_t flags, int *found) {
  char own[160];
  snprintf(own, sizeof own, "%s", name);
  *out = dlsym(RTLD_DEFAULT, own);
  if (!*out) *out = (void *)success;
  if (found) *found = 0;
  return OK;
}
int cudaGetDriverEntryPoint(const char *name, void **out, uint64_t flags, int *found) {
  return cudaGetDriverEntryPointByVersion(name, out, 0, flags, found);
}

int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuCtxGetCurrent(handle *out) { return *out = 0x99, OK; }
int cuDeviceGet(int *out, int which) { return *out = which, OK; }
int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
int cuDeviceGetAttribute(int *value, int which) { return *value = attribute(which), OK; }
int cuDevicePrimaryCtxGetState(int of, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return OK;
}
int cuGetErrorString(int error, const char **out) { return *out = cudaGetErrorString(error), OK; }
int cuGetErrorName(int error, const char **out) { return *out = cudaGetErrorName(error), OK; }
int cuFuncGetAttribute(int *value, int which) {
  return *value = which == 0 ? 1024 : which == 4 ? 32 : which == 8 ? attribute(97) : 0, OK;
}
int cuModuleLoadData(handle *out) { return *out = fresh(), OK; }
int cuModuleGetFunction(handle *out) { return *out = fresh(), OK; }
int cuOccupancyMaxActiveClusters(int *out) { return *out = 16, OK; }
/* NVRTC asks for tables that NVIDIA does not document, and does without where there are none. */
int cuGetExportTable(const void **out) { return *out = 0, NOT_FOUND; }
int cuPointerGetAttribute(handle *out, int which, handle at) { return *out = at, OK; }
int cuLaunchKernel(
    handle of, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    handle stream) {
  return launch(stream);
}
struct launch_config { unsigned grid[3], block[3], shared; handle stream; };
int cuLaunchKernelEx(const struct launch_config *how) { return launch(how->stream); }

int nvmlDeviceGetComputeRunningProcesses(handle of, unsigned *count) { return *count = 0, OK; }

/* ---- cuBLAS ------------------------------------------------------------------------------------------------------ */

static char description[1 << 12];
static __thread handle blas_stream;
int cublasCreate_v2(handle *out) { return *out = fresh(), OK; }
int cudnnCreate(handle *out) { return *out = fresh(), OK; }
int cublasSetStream_v2(handle of, handle stream) { return blas_stream = stream, OK; }
int cublasGetStream_v2(handle of, handle *stream) { return *stream = blas_stream, OK; }
int cublasGetMathMode(handle of, int *out) { return *out = 0, OK; }
int cublasGetPointerMode_v2(handle of, int *out) { return *out = 0, OK; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **out) { return *out = description, OK; }
int cublasLtMatrixLayoutCreate(void **out) { return *out = description, OK; }
int cublasLtMatmulPreferenceCreate(void **out) { return *out = description, OK; }
int cublasLtMatmulAlgoGetHeuristic(
    handle of, void *how, void *a, void *b, void *c, void *d, void *preference, int wanted, void *out, int *found) {
  return *found = 1, OK;
}
int cublasLtMatmul(
    handle of, void *how, void *alpha, void *a, void *la, void *b, void *lb, void *beta, void *c, void *lc, void *d,
    void *ld, void *algorithm, void *workspace, size_t size, handle stream) {
  return launch(stream);
}
int rehearsal_blas(void) { return launch(blas_stream); } /* every other routine of cuBLAS that computes */

/* ---- NCCL -------------------------------------------------------------------------------------------------------- */

struct unique_id { char bytes[128]; };
static __thread int64_t group, depth;
static const int widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* Who is in a group that was split off is not said to NCCL: Python tells (`rehearsal_communicator`). */
struct communicator { int size, rank; };
static int made(handle *out, int size, int rank) {
  struct communicator *one = malloc(sizeof *one);
  *one = (struct communicator){size, rank};
  return *out = (handle)one, OK;
}
void rehearsal_communicator(handle of, int size, int rank) { *(struct communicator *)of = (struct communicator){size, rank}; }
int ncclCommCount(handle of, int *size) { return *size = ((struct communicator *)of)->size, OK; }
int ncclCommUserRank(handle of, int *rank) { return *rank = ((struct communicator *)of)->rank, OK; }
int ncclGetVersion(int *version) { return *version = NCCL, OK; }
int ncclGetUniqueId(struct unique_id *out) { return memset(out, 7, sizeof *out), OK; }
int ncclCommInitRank(handle *out, int size, struct unique_id id, int rank) { return made(out, size, rank); }
int ncclCommInitRankConfig(handle *out, int size, struct unique_id id, int rank) { return made(out, size, rank); }
int ncclCommInitRankScalable(handle *out, int size, int rank) { return made(out, size, rank); }
int ncclCommSplit(handle of, int colour, int key, handle *out) { return colour < 0 ? *out = 0, OK : made(out, 1, 0); }
int ncclCommGetAsyncError(handle of, int *error) { return *error = 0, OK; }
const char *ncclGetErrorString(int error) { return "an error of the stand-in"; }
const char *ncclGetLastError(handle of) { return ""; }
int ncclGroupStart(void) {
  static int64_t groups;
  if (!depth++) group = __sync_add_and_fetch(&groups, 1);
  return OK;
}
int ncclGroupEnd(void) { if (!--depth) group = 0; return OK; }

static int sent(int kind, size_t count, int type, handle of, handle stream) {
  note(COLLECTIVE, kind, stream, of, (int64_t)count * widths[type], group);
  return OK;
}

/* Sums of floats that a host may read are one: a loss, the square of a norm. What kernels would have made is unknown. */
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, handle of, handle stream) {
  if (count <= 4096 && type == 7) for (size_t i = 0; i < count; i++) ((float *)to)[i] = 1;
  if (count <= 4096 && type == 8) for (size_t i = 0; i < count; i++) ((double *)to)[i] = 1;
  return sent(ALL_REDUCE, count, type, of, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, handle of, handle stream) {
  return sent(ALL_GATHER, count, type, of, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, handle of, handle stream) {
  return sent(REDUCE_SCATTER, count, type, of, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, handle of, handle stream) {
  return sent(BROADCAST, count, type, of, stream);
}
int ncclBcast(void *at, size_t count, int type, int root, handle of, handle stream) {
  return sent(BROADCAST, count, type, of, stream);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, handle of, handle stream) {
  return sent(REDUCE, count, type, of, stream);
}
int ncclSend(const void *from, size_t count, int type, int peer, handle of, handle stream) {
  return sent(SEND, count, type, of, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, handle of, handle stream) {
  return sent(RECV, count, type, of, stream);
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, handle of, handle stream) {
  return sent(ALL_TO_ALL, count, type, of, stream);
}
