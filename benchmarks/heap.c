/* Counts the bytes that a process has from malloc, and their peak. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
extern void *__libc_malloc(size_t); extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t); extern void *__libc_memalign(size_t, size_t); extern void __libc_free(void *);
static _Atomic long held, most;
static void *took(void *p) {
  if (p) { long now = atomic_fetch_add(&held, malloc_usable_size(p)) + malloc_usable_size(p), was = atomic_load(&most);
    while (now > was && !atomic_compare_exchange_weak(&most, &was, now)); }
  return p; }
static void gave(void *p) { if (p) atomic_fetch_sub(&held, malloc_usable_size(p)); }
void *malloc(size_t n) { return took(__libc_malloc(n)); }
void *calloc(size_t n, size_t m) { return took(__libc_calloc(n, m)); }
void *realloc(void *p, size_t n) { gave(p); void *q = __libc_realloc(p, n); if (!q && n) took(p); else took(q); return q; }
void *memalign(size_t a, size_t n) { return took(__libc_memalign(a, n)); }
void *aligned_alloc(size_t a, size_t n) { return took(__libc_memalign(a, n)); }
int posix_memalign(void **p, size_t a, size_t n) { *p = took(__libc_memalign(a, n)); return *p ? 0 : ENOMEM; }
void free(void *p) { gave(p); __libc_free(p); }
long heap_held(void) { return atomic_load(&held); }
long heap_most(int reset) { long was = atomic_load(&most); if (reset) atomic_store(&most, atomic_load(&held)); return was; }
