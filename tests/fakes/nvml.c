/* A fake libnvidia-ml.so.1 with energy counters that step as an H200's do. The real Python binding loads it:
 *
 *     cc -shared -fPIC -O1 -o DIR/libnvidia-ml.so.1 nvml.c -lpthread
 *     LD_LIBRARY_PATH=DIR FAKE_NVML='gpus=2,latency_us=3000,gpu1.no_energy=1' python3 sampler.py ...
 *
 * At its k-th step, at time t_k (monotonic clock, seconds), a counter shows round(power_w * 1000 * t_k) millijoules, so that a
 * value says when it appeared. t_k = phase + k * period + jitter(k); phases differ between GPUs.
 *
 * Settings (KEY for every GPU, gpuN.KEY for one): power_w, period_ms, jitter_ms (uniform, +-), latency_us, long_us (every 50th
 * read), no_energy, no_power (NotSupported), fail_from, fail_to (energy reads with these numbers fail), hang_at, hang_ms (that
 * read takes so long), state_ms (a query of the utilisation takes so long), reset_at (from that read on the counter counts from the reset), stuck_from, name, pids and drawing (of
 * processes that compute or draw on it, with + between them), open_error (a code: it has no handle). Without a GPU in front:
 * gpus, serial (reads of all GPUs wait for one lock), init_error (a code; 1: driver not loaded), mig. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, UNKNOWN = 999 };
#define MAX_GPUS 16

typedef struct {
	int index, mig_of;
	long reads;
	double reset_t;
	unsigned long long stuck;
} device;

static device gpu[MAX_GPUS], mig[MAX_GPUS];
static pthread_mutex_t serial = PTHREAD_MUTEX_INITIALIZER;

static const char *text(const device *d, const char *key)
{
	static __thread char out[128];
	const char *all = getenv("FAKE_NVML"), *found = NULL;
	char own[64];
	snprintf(own, sizeof own, "gpu%d.%s", d ? d->index : -1, key);
	if (!all)
		return NULL;
	for (int pass = 0; pass < 2 && !found; pass++) {
		const char *want = pass ? key : own;
		size_t n = strlen(want);
		for (const char *p = all; p && *p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
			if (!strncmp(p, want, n) && p[n] == '=')
				found = p + n + 1;
	}
	if (!found)
		return NULL;
	snprintf(out, sizeof out, "%.*s", (int)strcspn(found, ","), found);
	return out;
}

static double number(const device *d, const char *key, double otherwise)
{
	const char *s = text(d, key);
	return s ? atof(s) : otherwise;
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void wait_us(double us)
{
	struct timespec t = {(time_t)(us / 1e6), (long)((us - 1e6 * (long)(us / 1e6)) * 1e3)};
	nanosleep(&t, NULL);
}

static double step_time(const device *d, long k)
{
	double period = number(d, "period_ms", 100) * 1e-3;
	double jitter = number(d, "jitter_ms", 0.7) * 1e-3;
	unsigned h = (unsigned)k * 2654435761u + (unsigned)d->index * 40503u;
	h ^= h >> 15;
	h *= 2246822519u;
	h ^= h >> 13;
	return d->index * 0.0137 + k * period + jitter * ((h % 20001) / 10000.0 - 1);
}

static unsigned long long counter(const device *d, double t)
{
	double period = number(d, "period_ms", 100) * 1e-3;
	long k = (long)((t - d->index * 0.0137) / period) + 1;
	while (step_time(d, k) > t)
		k--;
	return (unsigned long long)(number(d, "power_w", 125) * 1e3 * (step_time(d, k) - d->reset_t) + 0.5);
}

static void latency(device *d)
{
	double us = number(d, "latency_us", 100);
	if (d->reads % 50 == 49)
		us = number(d, "long_us", us);
	if (d->reads == (long)number(d, "hang_at", -1))
		us = number(d, "hang_ms", 300) * 1e3;
	wait_us(us / 2);
}

#define OPTIONAL_LOCK if (number(NULL, "serial", 0)) pthread_mutex_lock(&serial)
#define OPTIONAL_UNLOCK if (number(NULL, "serial", 0)) pthread_mutex_unlock(&serial)

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	for (int i = 0; i < MAX_GPUS; i++) {
		gpu[i].index = mig[i].index = i;
		gpu[i].mig_of = -1;
		mig[i].mig_of = i;
	}
	return number(NULL, "init_error", 0) == 1 ? DRIVER_NOT_LOADED : (int)number(NULL, "init_error", SUCCESS);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int e)
{
	return e == NOT_SUPPORTED ? "Not Supported" : e == DRIVER_NOT_LOADED ? "Driver Not Loaded" : e == NOT_FOUND ? "Not Found" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *s, unsigned n) { return snprintf(s, n, "580.0-fake"), SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = (unsigned)number(NULL, "gpus", 1), SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device **d)
{
	if (i >= (unsigned)number(NULL, "gpus", 1))
		return INVALID_ARGUMENT;
	*d = &gpu[i];
	return (int)number(*d, "open_error", SUCCESS);
}
int nvmlDeviceGetUUID(device *d, char *s, unsigned n)
{
	const char *kind = d->mig_of < 0 ? "GPU" : "MIG";
	snprintf(s, n, "%s-%08x-0000-4000-8000-%012d", kind, 0xaf7b61d0u + (unsigned)d->index, d->index);
	return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **d)
{
	char s[96];
	for (int i = 0; i < (int)number(NULL, "gpus", 1); i++) {
		*d = &gpu[i];
		nvmlDeviceGetUUID(*d, s, sizeof s);
		if (!strcmp(s, uuid))
			return SUCCESS;
		*d = &mig[i];
		nvmlDeviceGetUUID(*d, s, sizeof s);
		if (number(NULL, "mig", 0) && !strcmp(s, uuid))
			return SUCCESS;
	}
	return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *m, device **d)
{
	if (m->mig_of < 0)
		return INVALID_ARGUMENT;
	*d = &gpu[m->mig_of];
	return SUCCESS;
}
int nvmlDeviceGetName(device *d, char *s, unsigned n)
{
	const char *name = text(d, "name");
	return snprintf(s, n, "%s", name ? name : "NVIDIA H200"), SUCCESS;
}
int nvmlDeviceGetIndex(device *d, unsigned *i) { return *i = (unsigned)d->index, SUCCESS; }
typedef struct {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char bus_id[32];
} pci_info;
int nvmlDeviceGetPciInfo_v3(device *d, pci_info *p)
{
	memset(p, 0, sizeof *p);
	snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0x18 + d->index);
	return SUCCESS;
}
int nvmlDeviceGetTotalEnergyConsumption(device *d, unsigned long long *mj)
{
	int rc = SUCCESS;
	if (number(d, "no_energy", 0))
		return NOT_SUPPORTED;
	OPTIONAL_LOCK;
	long n = ++d->reads;
	latency(d);
	if (n == (long)number(d, "reset_at", -1))
		d->reset_t = now() - 0.2;
	*mj = counter(d, now());
	if (n >= number(d, "stuck_from", 1e18)) {
		if (!d->stuck)
			d->stuck = *mj;
		*mj = d->stuck;
	}
	if (n >= number(d, "fail_from", 1e18) && n <= number(d, "fail_to", 1e18))
		rc = UNKNOWN;
	latency(d);
	OPTIONAL_UNLOCK;
	return rc;
}
int nvmlDeviceGetPowerUsage(device *d, unsigned *mw)
{
	if (number(d, "no_power", 0))
		return NOT_SUPPORTED;
	*mw = (unsigned)(number(d, "power_w", 125) * 1e3);
	return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(device *d, unsigned *mw) { return (void)d, *mw = 700000, SUCCESS; }
int nvmlDeviceGetPowerManagementDefaultLimit(device *d, unsigned *mw) { return (void)d, *mw = 700000, SUCCESS; }
int nvmlDeviceGetPersistenceMode(device *d, unsigned *on) { return (void)d, *on = 1, SUCCESS; }
int nvmlDeviceGetApplicationsClock(device *d, unsigned kind, unsigned *mhz) { return (void)d, *mhz = kind == 1 ? 1980 : 3201, SUCCESS; }
int nvmlDeviceGetEccMode(device *d, unsigned *a, unsigned *b) { return (void)d, *a = *b = 1, SUCCESS; }
int nvmlDeviceGetMigMode(device *d, unsigned *a, unsigned *b)
{
	(void)d;
	*a = *b = (unsigned)number(NULL, "mig", 0);
	return SUCCESS;
}
int nvmlDeviceGetTemperature(device *d, unsigned sensor, unsigned *c) { return (void)d, (void)sensor, *c = 41, SUCCESS; }
int nvmlDeviceGetClockInfo(device *d, unsigned kind, unsigned *mhz) { return (void)d, *mhz = kind == 1 ? 1980 : 3201, SUCCESS; }
int nvmlDeviceGetCurrentClocksEventReasons(device *d, unsigned long long *r) { return (void)d, *r = 4, SUCCESS; }
int nvmlDeviceGetUtilizationRates(device *d, unsigned *u) { return wait_us(number(d, "state_ms", 0) * 1e3), u[0] = 97, u[1] = 12, SUCCESS; }

typedef struct {
	unsigned pid;
	unsigned long long memory;
	unsigned gpu_instance, compute_instance;
} process;

static int running(device *d, const char *key, unsigned *n, process *found)
{
	const char *p = text(d, key);
	unsigned room = *n, i = 0;
	for (; p; p = strchr(p, '+') ? strchr(p, '+') + 1 : NULL, i++)
		if (i < room)
			found[i] = (process){(unsigned)atoi(p), 1 << 30, 0, 0};
	*n = i;
	return i > room ? INSUFFICIENT_SIZE : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *n, process *found) { return running(d, "pids", n, found); }
/* as in an older driver */
int nvmlDeviceGetGraphicsRunningProcesses_v2(device *d, unsigned *n, process *found) { return running(d, "drawing", n, found); }
