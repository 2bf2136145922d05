#!/usr/bin/env python3
"""Real SGLang PD control-traffic workload, KV-manager level, CPU only.

Starts, as separate OS processes on 127.0.0.1:

  bootstrap   the real bootstrap HTTP server of the chosen backend
  prefill     a real <Backend>KVManager in PREFILL mode, driving real KVSenders
  decode:N    real <Backend>KVManager(s) in DECODE mode, driving real KVReceivers

and walks "rooms" (bootstrap_room life cycles) through them.  Nothing of SGLang
is copied or patched: the program only calls the installed package.  What the
scheduler would do around the KV objects (poll in a loop, init after
WaitingForInput, send chunks, clear on Success, failure_exception on Failed,
hold an aborted decode room until its ABORT_ACKs came) is done here by a small
loop of our own.

Every call and every status change seen by polling goes to a JSONL truth file.
See README.md next to this file.
"""

import argparse
import asyncio
import ctypes
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time

STATUS = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success"}
TERMINAL = (0, 4)
HERE = os.path.dirname(os.path.abspath(__file__))


def clocks():
    return {
        "rt": time.clock_gettime_ns(time.CLOCK_REALTIME),
        "bt": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    }


class Truth:
    """Append-only JSONL; one write(2) per line, O_APPEND, shared by all processes."""

    def __init__(self, path, who):
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.who = who
        self.pid = os.getpid()

    def put(self, kind, **kw):
        rec = {"kind": kind, **clocks(), "role": self.who, "pid": self.pid}
        rec.update(kw)
        os.write(self.fd, (json.dumps(rec) + "\n").encode())
        return rec


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def own_threads():
    names = {t.native_id: t.name for t in threading.enumerate()}
    out = []
    for tid in sorted(int(x) for x in os.listdir("/proc/self/task")):
        try:
            comm = open(f"/proc/self/task/{tid}/comm").read().strip()
        except OSError:
            continue
        out.append({"tid": tid, "comm": comm, "py": names.get(tid)})
    return out


def own_listeners():
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            t = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if t.startswith("socket:["):
            inodes.add(t[8:-1])
    ports = []
    for f in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            rows = open(f).read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            c = row.split()
            if c[3] == "0A" and c[9] in inodes:
                ports.append(int(c[1].rsplit(":", 1)[1], 16))
    return sorted(set(ports))


# --------------------------------------------------------------------------
# role processes
# --------------------------------------------------------------------------


class Pipe:
    """JSON lines to the driver on the original stdout; fd 1 itself goes to the log."""

    def __init__(self):
        self.f = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.lock = threading.Lock()
        self.inbox = queue.SimpleQueue()

    def say(self, **kw):
        with self.lock:
            self.f.write(json.dumps(kw) + "\n")

    def start_reader(self):
        def rd():
            for line in sys.stdin:
                line = line.strip()
                if line:
                    self.inbox.put(json.loads(line))
            self.inbox.put({"op": "quit"})

        threading.Thread(target=rd, name="harness-stdin", daemon=True).start()


def role_env_check():
    import logging

    lvl = logging.DEBUG if os.environ.get("PDH_DEBUG") == "1" else logging.INFO
    logging.basicConfig(
        level=lvl, stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("urllib3").setLevel(logging.INFO)
    logging.getLogger("sgl_kernel").setLevel(logging.INFO)


def name_process(cfg, title):
    """SGLang names its processes with setproctitle; do the same so that comm looks alike."""
    if cfg.get("proctitle", True):
        try:
            import setproctitle

            setproctitle.setproctitle(title)
        except ImportError:
            pass


def publish_args(cfg, mode, tp_size, rank):
    from types import SimpleNamespace

    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    kw = {}
    if tp_size > 1:
        kw["tp_size"] = tp_size
    sa = ServerArgs(
        model_path="dummy",
        device="cpu",
        host="127.0.0.1",
        port=cfg["http_port"],
        disaggregation_mode=mode,
        disaggregation_transfer_backend=cfg["backend"],
        disaggregation_bootstrap_port=cfg["bootstrap_port"],
        disaggregation_decode_allocation_policy=cfg["policy"],
        **kw,
    )
    publish(sa, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    # Stand-in: the manager only stores this handle when pp_size == 1.
    get_parallel().override_permanently(pp_group=SimpleNamespace(world_size=1, rank_in_group=0))
    return sa


class Pool:
    """CPU buffers standing in for the KV pool, plus SGLang's own MetadataBuffers."""

    def __init__(self, cfg, side, tp_size):
        import torch

        from sglang.srt.disaggregation.utils import MetadataBuffers

        self.torch = torch
        self.layers = cfg["layers"]
        self.pages = cfg["pool_pages"]
        heads = cfg["kv_heads"] // tp_size
        self.item = cfg["page_size"] * heads * cfg["head_bytes"]
        self.heads = heads
        self.bufs = [
            torch.zeros((self.pages, self.item), dtype=torch.uint8) for _ in range(2 * self.layers)
        ]
        self.aux = MetadataBuffers(
            size=cfg["aux_slots"],
            hidden_size=64,
            hidden_states_dtype=torch.bfloat16,
            max_sampling_mask_tokens=64,
        )

    def fill(self, room, idx):
        t = self.torch
        pos = t.arange(len(idx), dtype=t.int64)
        rows = t.from_numpy(idx.astype("int64"))
        for layer, b in enumerate(self.bufs):
            v = ((room % 251 * 7 + pos * 13 + layer * 3 + 1) % 251).to(t.uint8)
            b[rows] = v[:, None].expand(-1, self.item)

    def check(self, room, idx):
        t = self.torch
        pos = t.arange(len(idx), dtype=t.int64)
        rows = t.from_numpy(idx.astype("int64"))
        for layer, b in enumerate(self.bufs):
            v = ((room % 251 * 7 + pos * 13 + layer * 3 + 1) % 251).to(t.uint8)
            if not bool((b[rows] == v[:, None]).all()):
                return False
        return True

    def kv_args(self, cfg, rank):
        from sglang.srt.disaggregation.base.conn import KVArgs

        a = KVArgs()
        a.engine_rank = rank
        a.pp_rank = 0
        a.system_dp_rank = 0
        a.rust_http_port = None
        a.kv_cache_dtype_str = "bfloat16"
        a.kv_layout = None
        a.prefill_start_layer = 0
        a.prefill_end_layer = self.layers
        a.kv_data_ptrs = [b.data_ptr() for b in self.bufs]
        a.kv_data_lens = [b.numel() for b in self.bufs]
        a.kv_item_lens = [self.item] * len(self.bufs)
        a.kv_layer_ids = []
        a.aux_data_ptrs, a.aux_data_lens, a.aux_item_lens = self.aux.get_buf_infos()
        a.state_types = []
        a.state_data_ptrs = []
        a.state_data_lens = []
        a.state_item_lens = []
        a.state_layer_ids = []
        a.state_dim_per_tensor = []
        a.state_slice_outer_counts = []
        a.state_conv_shard_groups = []
        a.is_hybrid_mla_backend = False
        a.swa_kv_cache_layout = None
        a.mla_compression_ratios = None
        a.kv_head_num = self.heads
        a.total_kv_head_num = cfg["kv_heads"]
        a.page_size = cfg["page_size"]
        a.ib_device = None
        a.gpu_id = 0
        if cfg["backend"] == "nixl":
            # NIXL takes KV for GPU memory unless told otherwise
            a.kv_data_mem_kinds = ["DRAM"] * len(self.bufs)
        return a


def room_pages(cfg, slot, n):
    import numpy as np

    start = (slot * n) % max(1, cfg["pool_pages"] - n + 1)
    idx = np.arange(start, start + n, dtype=np.int32)
    if cfg.get("scatter"):
        idx = np.random.default_rng(slot).permutation(idx).astype(np.int32)
    return idx


class RoleBase:
    def __init__(self, cfg, role, rank, tp_size):
        self.cfg = cfg
        self.role = role
        self.rank = rank
        self.tp_size = tp_size
        self.pipe = Pipe()
        self.truth = Truth(cfg["truth"], role)
        self.rooms = {}
        self.later = []  # (monotonic time, callable)
        self.stop = False

    def call(self, rid, room, op, fn, **note):
        """Run one SGLang call, log begin/end and any exception."""
        b = clocks()
        exc = None
        val = None
        try:
            val = fn()
        except Exception as e:  # an SGLang exception is data here, not an error of ours
            exc = f"{type(e).__name__}: {e}"
        self.truth.put("call", rid=rid, room=room, op=op, begin_rt=b["rt"], begin_bt=b["bt"], exc=exc, **note)
        self.pipe.say(ev="call", rid=rid, op=op, exc=exc)
        return val, exc

    def saw(self, r, status):
        if status == r["last"]:
            return False
        self.truth.put(
            "status", rid=r["rid"], room=r["room"],
            frm=STATUS.get(r["last"]), to=STATUS[status], code=int(status),
        )
        r["last"] = status
        self.pipe.say(ev="status", rid=r["rid"], to=int(status), **clocks())
        return True

    def start(self, mode):
        from sglang.srt.disaggregation.utils import (
            DisaggregationMode,
            KVClassType,
            TransferBackend,
            get_kv_class,
        )

        cfg = self.cfg
        sa = publish_args(cfg, mode, self.tp_size, self.rank)
        if cfg["backend"] == "mooncake":
            from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
                init_mooncake_transfer_engine,
            )

            init_mooncake_transfer_engine("127.0.0.1", 0, None)
        tb = TransferBackend(cfg["backend"])
        self.pool = Pool(cfg, mode, self.tp_size)
        self.sender_cls = get_kv_class(tb, KVClassType.SENDER)
        self.receiver_cls = get_kv_class(tb, KVClassType.RECEIVER)
        mgr_cls = get_kv_class(tb, KVClassType.MANAGER)
        self.mgr = mgr_cls(
            self.pool.kv_args(cfg, self.rank), DisaggregationMode(mode), sa, cfg["mla"]
        )
        info = {
            "rank_port": self.mgr.rank_port,
            "local_ip": self.mgr.local_ip,
            "session_id": getattr(self.mgr, "get_session_id", lambda: None)()
            if cfg["backend"] == "mooncake"
            else getattr(getattr(self.mgr, "agent", None), "name", None),
            "listeners": own_listeners(),
            "tp_size": self.tp_size,
            "rank": self.rank,
            "threads": own_threads(),
        }
        self.truth.put("proc", **info)
        self.pipe.say(ev="ready", **info)

    def loop(self):
        period = self.cfg["poll_ms"] / 1000.0
        self.pipe.start_reader()
        while not self.stop:
            t0 = time.monotonic()
            while True:
                try:
                    m = self.pipe.inbox.get_nowait()
                except queue.Empty:
                    break
                op = m.pop("op")
                if op == "quit":
                    self.stop = True
                elif op == "threads":
                    self.truth.put("threads", threads=own_threads(), listeners=own_listeners())
                    # what SGLang itself still remembers at the end of the run
                    self.truth.put(
                        "tables",
                        request_status={str(k): STATUS[int(v)] for k, v in list(self.mgr.request_status.items())},
                        transfer_infos=[str(k) for k in getattr(self.mgr, "transfer_infos", {})],
                        failure_records={str(k): v for k, v in self.mgr.failure_records.items()},
                    )
                    self.pipe.say(ev="threads", threads=own_threads())
                else:
                    getattr(self, "op_" + op)(**m)
            now = time.monotonic()
            due = [x for x in self.later if x[0] <= now]
            self.later = [x for x in self.later if x[0] > now]
            for _, fn in due:
                fn()
            for r in list(self.rooms.values()):
                if r["obj"] is not None and not r["paused"]:
                    self.poll_one(r)
            dt = time.monotonic() - t0
            if dt < period:
                time.sleep(period - dt)
        self.truth.put("proc_exit", clean=True)
        os._exit(0)

    def after(self, ms, fn):
        self.later.append((time.monotonic() + ms / 1000.0, fn))

    def op_pause(self, rid):
        self.rooms[rid]["paused"] = True
        self.pipe.say(ev="call", rid=rid, op="pause", exc=None)

    def op_resume(self, rid):
        self.rooms[rid]["paused"] = False


class PrefillRole(RoleBase):
    def op_send_new(self, rid, room, slot, pages, chunks=1, send_upto=None, gap_ms=0, compute_ms=0):
        cfg = self.cfg
        addr = f"127.0.0.1:{cfg['bootstrap_port']}"
        idx = room_pages(cfg, slot, pages)
        obj, exc = self.call(
            rid, room, "sender_new", lambda: self.sender_cls(self.mgr, addr, room), pages=pages
        )
        r = dict(
            rid=rid, room=room, obj=obj, idx=idx, aux=slot % cfg["aux_slots"], last=None, paused=False,
            inited=False, chunks=max(1, chunks), next_chunk=0, busy=False,
            send_upto=chunks if send_upto is None else send_upto, gap=gap_ms, compute=compute_ms,
        )
        self.rooms[rid] = r
        if cfg["policy"] == "prefill_complete" and obj is not None:
            # prefill computes first and tells decode afterwards; decode allocates only then
            self.after(compute_ms, lambda: self.call(rid, room, "mark_prefill_complete", obj.mark_prefill_complete))

    def op_send_abort(self, rid):
        r = self.rooms[rid]
        if r["obj"] is None:  # it has failed already
            self.pipe.say(ev="call", rid=rid, op="sender_abort", exc="gone")
            return
        self.call(rid, r["room"], "sender_abort", r["obj"].abort)

    def op_send_more(self, rid, upto=None):
        r = self.rooms[rid]
        r["send_upto"] = r["chunks"] if upto is None else upto
        if r["inited"] and not r["busy"]:
            r["busy"] = True
            self.send_next(r)

    def send_next(self, r):
        if r["obj"] is None or r["next_chunk"] >= min(r["chunks"], r["send_upto"]):
            r["busy"] = False
            return
        import numpy as np

        k = r["next_chunk"]
        part = np.array_split(r["idx"], r["chunks"])[k]
        r["next_chunk"] += 1
        last = r["next_chunk"] == r["chunks"]
        self.call(
            r["rid"], r["room"], "send_chunk", lambda: r["obj"].send(part), n=int(len(part)), last=last, chunk=k
        )
        if r["next_chunk"] < min(r["chunks"], r["send_upto"]):
            self.after(r["gap"], lambda: self.send_next(r))
        else:
            r["busy"] = False

    def poll_one(self, r):
        st = int(r["obj"].poll())
        self.saw(r, st)
        if st == 2 and not r["inited"]:
            r["inited"] = True
            r["obj"].pop_decode_prefix_len()
            self.pool.fill(r["room"], r["idx"])
            self.pool.aux.bootstrap_room[r["aux"], 0] = r["room"]
            self.call(
                r["rid"], r["room"], "sender_init", lambda: r["obj"].init(len(r["idx"]), r["aux"])
            )
            r["busy"] = True
            self.after(0 if self.cfg["policy"] == "prefill_complete" else r["compute"], lambda: self.send_next(r))
        elif st == 4:
            self.call(r["rid"], r["room"], "sender_clear", r["obj"].clear)
            self.finish(r, st)
        elif st == 0:
            _, exc = self.call(r["rid"], r["room"], "sender_failure_exception", r["obj"].failure_exception)
            self.finish(r, st, reason=exc)

    def finish(self, r, st, reason=None):
        self.truth.put("end_of_room", rid=r["rid"], room=r["room"], final=STATUS[st], reason=reason)
        self.pipe.say(ev="final", rid=r["rid"], to=st, reason=reason, **clocks())
        r["obj"] = None


class DecodeRole(RoleBase):
    def op_advertise_closed_port(self, port):
        """Scenario h: from now on metadata tells prefill a status port nobody listens on."""
        self.real_rank_port = self.mgr.rank_port
        self.mgr.rank_port = port
        self.truth.put("fault", what="advertise_closed_port", port=port, real_port=self.real_rank_port)
        self.pipe.say(ev="call", rid="-", op="advertise_closed_port", exc=None)

    def op_recv_new(self, rid, room, slot, pages, auto_meta=True, meta_ms=0, hold_release=True):
        cfg = self.cfg
        addr = f"127.0.0.1:{cfg['bootstrap_port']}"
        idx = room_pages(cfg, slot, pages)
        obj, exc = self.call(rid, room, "receiver_new", lambda: self.receiver_cls(self.mgr, addr, room))
        r = dict(
            rid=rid, room=room, obj=obj, idx=idx, aux=slot % cfg["aux_slots"], last=None, paused=False,
            auto_meta=auto_meta, meta_ms=meta_ms, meta_sent=False, hold=None, hold_release=hold_release, final=None,
        )
        self.rooms[rid] = r
        # a fresh aux slot must read 0 until prefill's metadata landed (what the scheduler's allocator ensures)
        self.pool.aux.clear_slot(r["aux"])
        ok, exc = self.call(rid, room, "ensure_parallel_info", lambda: self.mgr.try_ensure_parallel_info(addr))
        self.saw(r, int(obj.poll()))
        if ok:
            self.call(rid, room, "receiver_init", lambda: obj.init(0))

    def op_recv_meta(self, rid):
        self.send_meta(self.rooms[rid])

    def send_meta(self, r):
        if r["obj"] is None or r["meta_sent"]:
            return
        r["meta_sent"] = True
        self.call(
            r["rid"], r["room"], "send_metadata",
            lambda: r["obj"].send_metadata(r["idx"], r["aux"], []), n=int(len(r["idx"])),
        )

    def op_recv_abort(self, rid):
        r = self.rooms[rid]
        if r["obj"] is None:
            self.pipe.say(ev="call", rid=rid, op="receiver_abort", exc="gone")
            return
        self.call(rid, r["room"], "receiver_abort", r["obj"].abort)
        r["paused"] = False

    def poll_one(self, r):
        if r["hold"] is not None:
            return self.poll_hold(r)
        st = int(r["obj"].poll())
        # The scheduler hides Success until the first-token metadata really landed.
        if st == 4 and int(self.pool.aux.bootstrap_room[r["aux"], 0]) != r["room"]:
            self.truth.put("note", rid=r["rid"], room=r["room"], text="Success before metadata buffer landed")
        self.saw(r, st)
        if st == 2 and r["auto_meta"] and not r["meta_sent"]:
            if r["meta_ms"]:
                r["auto_meta"] = False
                self.after(r["meta_ms"], lambda: self.send_meta(r))
            else:
                self.send_meta(r)
        elif st == 4:
            ok = self.pool.check(r["room"], r["idx"])
            aux = int(self.pool.aux.bootstrap_room[r["aux"], 0])
            self.call(r["rid"], r["room"], "receiver_clear", r["obj"].clear)
            self.finish(r, st, kv_ok=ok, aux_room=aux)
        elif st == 0:
            _, exc = self.call(r["rid"], r["room"], "receiver_failure_exception", r["obj"].failure_exception)
            # Scheduler's transfer queue: a failed room is told to prefill and its pages are held until
            # every prefill rank acked, or the release timeout.  A prealloc-queue room is just cleared.
            if r["meta_sent"] and self.mgr.enable_deferred_decode_kv_release and r["hold_release"]:
                if not r["obj"].abort_notified:
                    self.call(
                        r["rid"], r["room"], "ensure_abort_notified",
                        lambda: r["obj"].ensure_abort_notified(force_arm=True),
                    )
                if r["obj"].abort_notified:
                    r["hold"] = time.monotonic() + self.cfg["release_timeout"]
                    self.finish(r, st, reason=exc, keep=True)
                    self.truth.put("hold_begin", rid=r["rid"], room=r["room"], acks_needed=len(r["obj"].bootstrap_infos))
                    return
            self.call(r["rid"], r["room"], "receiver_clear", r["obj"].clear)
            self.finish(r, st, reason=exc)

    def poll_hold(self, r):
        need = len(r["obj"].bootstrap_infos)
        safe = self.mgr.is_abort_release_safe(r["room"], need)
        if safe or time.monotonic() >= r["hold"]:
            self.mgr.clear_deferred_abort_state(r["room"])
            self.call(r["rid"], r["room"], "receiver_clear", r["obj"].clear)
            self.truth.put("hold_end", rid=r["rid"], room=r["room"], outcome="drained" if safe else "timeout")
            self.pipe.say(ev="call", rid=r["rid"], op="hold_end", exc=None)
            r["obj"] = None

    def finish(self, r, st, reason=None, keep=False, **kw):
        self.truth.put("end_of_room", rid=r["rid"], room=r["room"], final=STATUS[st], reason=reason, **kw)
        self.pipe.say(ev="final", rid=r["rid"], to=st, reason=reason, **clocks(), **kw)
        if not keep:
            r["obj"] = None


def run_role(name, cfg):
    die_with_parent()
    role_env_check()
    if name == "bootstrap":
        pipe = Pipe()
        truth = Truth(cfg["truth"], name)
        name_process(cfg, "sglang::pdh_boot")
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        cls = get_kv_class(TransferBackend(cfg["backend"]), KVClassType.BOOTSTRAP_SERVER)
        cls("127.0.0.1", cfg["bootstrap_port"])
        for _ in range(200):
            if cfg["bootstrap_port"] in own_listeners():
                break
            time.sleep(0.05)
        info = {"listeners": own_listeners(), "threads": own_threads()}
        truth.put("proc", **info)
        pipe.say(ev="ready", **info)
        for line in sys.stdin:
            m = json.loads(line)
            if m["op"] == "quit":
                break
        truth.put("proc_exit", clean=True)
        os._exit(0)
    if name == "prefill":
        name_process(cfg, "sglang::scheduler")
        r = PrefillRole(cfg, name, 0, 1)
        r.start("prefill")
        r.loop()
    elif name.startswith("decode:"):
        n = int(name.split(":")[1])
        name_process(cfg, f"sglang::scheduler_TP{n}" if cfg["decode_tp"] > 1 else "sglang::scheduler")
        rank = n if cfg["decode_tp"] > 1 else 0
        r = DecodeRole(cfg, name, rank, cfg["decode_tp"])
        r.start("decode")
        r.loop()
    else:
        raise SystemExit("unknown role " + name)


# --------------------------------------------------------------------------
# driver
# --------------------------------------------------------------------------


class Proc:
    def __init__(self, H, name):
        self.H = H
        self.name = name
        self.alive = False
        self.info = {}
        self.last = {}  # rid -> last status code
        self.final = {}  # rid -> final event
        self.calls = {}  # rid -> list of ops
        self.cond = asyncio.Condition()

    async def start(self):
        cfg = self.H.cfg
        env = dict(os.environ)
        env.update(self.H.env)
        log = open(os.path.join(cfg["logdir"], self.name.replace(":", "") + ".log"), "ab")
        self.p = await asyncio.create_subprocess_exec(
            sys.executable, os.path.abspath(__file__), "--role", self.name, "--cfg", json.dumps(cfg),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, limit=1 << 22,
        )
        self.alive = True
        self.task = asyncio.create_task(self.reader())

    async def reader(self):
        while True:
            line = await self.p.stdout.readline()
            if not line:
                break
            try:
                m = json.loads(line)
            except ValueError:
                continue
            ev = m["ev"]
            async with self.cond:
                if ev == "ready":
                    self.info = m
                elif ev == "status":
                    self.last[m["rid"]] = m["to"]
                elif ev == "final":
                    self.final[m["rid"]] = m
                elif ev == "call":
                    self.calls.setdefault(m["rid"], []).append(m["op"])
                self.cond.notify_all()
        rc = await self.p.wait()
        async with self.cond:
            self.alive = False
            self.cond.notify_all()
        self.H.truth.put("proc_gone", who=self.name, child=self.p.pid, rc=rc)

    async def until(self, pred, timeout):
        async def w():
            async with self.cond:
                while not pred():
                    if not self.alive:
                        return False
                    await self.cond.wait()
                return True

        try:
            return await asyncio.wait_for(w(), timeout)
        except asyncio.TimeoutError:
            return False

    async def ready(self, timeout=600):
        ok = await self.until(lambda: bool(self.info), timeout)
        if not ok:
            raise SystemExit(f"{self.name} did not come up; see {self.H.cfg['logdir']}")

    def cmd(self, op, **kw):
        if not self.alive:
            return
        self.p.stdin.write((json.dumps({"op": op, **kw}) + "\n").encode())

    async def called(self, rid, op, timeout=60):
        return await self.until(lambda: op in self.calls.get(rid, ()), timeout)

    async def at(self, rid, codes, timeout):
        return await self.until(lambda: self.last.get(rid) in codes, timeout)

    async def done(self, rid, timeout):
        return await self.until(lambda: rid in self.final, timeout)

    def kill(self, sig=signal.SIGKILL):
        if self.p.returncode is None:
            self.H.truth.put("signal", target=self.name, child=self.p.pid, sig=signal.Signals(sig).name)
            os.kill(self.p.pid, sig)


class Room:
    def __init__(self, H, scenario, room=None, expect=None):
        H.n += 1
        self.slot = H.n
        self.rid = f"{scenario}-{H.n:05d}"
        self.room = H.new_room() if room is None else room
        self.scenario = scenario
        self.expect = expect
        self.decodes = []
        self.notes = {}
        self.begin = None


class Harness:
    def __init__(self, a, cfg, env):
        self.a = a
        self.cfg = cfg
        self.env = env
        self.truth = Truth(cfg["truth"], "driver")
        self.n = 0
        self.rng = random.Random(a.seed)
        self.rooms = []
        self.P = None
        self.B = None
        self.D = []

    def new_room(self):
        # routers draw bootstrap_room as a random 63-bit integer
        return self.rng.randrange(0, 2**63) if self.a.room_ids == "random" else 1000 + self.n

    def room(self, scenario, room=None, expect=None, decode=None):
        r = Room(self, scenario, room, expect)
        if self.cfg["decode_tp"] > 1:
            r.decodes = list(self.D)
        else:
            r.decodes = [self.D[(decode if decode is not None else r.slot) % len(self.D)]]
        self.rooms.append(r)
        return r

    def begin(self, r):
        r.begin = self.truth.put("room_begin", rid=r.rid, room=r.room, scenario=r.scenario, expect=r.expect,
                                 decodes=[d.name for d in r.decodes])

    # convenience wrappers
    def snew(self, r, **kw):
        r.begin or self.begin(r)
        self.P.cmd("send_new", rid=r.rid, room=r.room, slot=r.slot, pages=kw.pop("pages", self.a.pages), **kw)

    def rnew(self, r, d=None, **kw):
        r.begin or self.begin(r)
        pages = kw.pop("pages", self.a.pages)
        for x in [d] if d else r.decodes:
            x.cmd("recv_new", rid=r.rid, room=r.room, slot=r.slot, pages=pages, **kw)

    async def settle(self, r, extra=0.0):
        """Wait until every side of the room is final, or the run's patience ends."""
        t = self.a.patience + extra
        await asyncio.gather(
            *[p.done(r.rid, t) for p in [self.P] + r.decodes if p.alive]
        )

    # ---- scenarios -------------------------------------------------------

    async def sc_a(self, r):
        """normal success"""
        self.snew(r, chunks=self.a.chunks, gap_ms=self.a.gap_ms, compute_ms=self.a.compute_ms)
        self.rnew(r)
        await self.settle(r)

    async def sc_b(self, r):
        """decode aborts after metadata, before the transfer"""
        self.snew(r, send_upto=0)
        self.rnew(r)
        await self.P.at(r.rid, (2,), 60)
        r.decodes[0].cmd("recv_abort", rid=r.rid)
        await self.settle(r)

    async def sc_c(self, r):
        """ABORT overtakes the prefill's KVSender: no-op, sender created afterwards"""
        d = r.decodes[0]
        self.rnew(r, auto_meta=False)
        await d.called(r.rid, "receiver_init")
        d.cmd("recv_abort", rid=r.rid)
        await d.called(r.rid, "receiver_abort")
        await asyncio.sleep(self.a.race_ms / 1000)
        self.snew(r)
        await self.settle(r)

    async def sc_f(self, r):
        """prefill sends all chunks but the last one"""
        self.snew(r, chunks=3, send_upto=2)
        self.rnew(r)
        await self.settle(r)

    async def sc_g(self, r):
        """two decode ranks are required, rank 1 never sends its metadata"""
        self.snew(r)
        self.rnew(r, r.decodes[0])
        self.rnew(r, r.decodes[1], auto_meta=False)
        await self.settle(r)

    async def sc_h(self, r):
        """the status message cannot reach decode"""
        self.snew(r)
        self.rnew(r)
        await self.settle(r)

    async def sc_m(self, r):
        """prefill aborts the request; 0.5.23 tells decode nothing"""
        self.snew(r, send_upto=0)
        self.rnew(r)
        await self.P.at(r.rid, (2,), 60)
        self.P.cmd("send_abort", rid=r.rid)
        await self.settle(r)

    async def sc_p(self, r):
        """decode never shows up for the room"""
        r.decodes = []
        self.snew(r)
        await self.settle(r)

    async def sc_s(self, r):
        """slow prefill: computes for --slow-ms after the metadata came; healthy (use --pin: no time-outs)"""
        ms = self.a.slow_ms
        self.snew(r, chunks=self.a.chunks, compute_ms=ms)
        self.rnew(r)
        await self.settle(r, ms / 1000 + 30)

    async def sc_u(self, r):
        """the client hangs up while decode waits for memory; prefill never gets the request: ABORT alone, no pin"""
        d = r.decodes[0]
        self.rnew(r, auto_meta=False)
        await d.called(r.rid, "receiver_init")
        d.cmd("recv_abort", rid=r.rid)
        await d.done(r.rid, self.a.patience)

    async def sc_v(self, r):
        """the client hangs up on both: ABORT overtakes the sender, which is then aborted as well: no pin"""
        d = r.decodes[0]
        self.rnew(r, auto_meta=False)
        await d.called(r.rid, "receiver_init")
        d.cmd("recv_abort", rid=r.rid)
        await d.called(r.rid, "receiver_abort")
        self.snew(r, send_upto=0)
        await asyncio.sleep(0.3)
        self.P.cmd("send_abort", rid=r.rid)
        await self.settle(r)

    async def sc_l(self, r):
        """large kv_indices"""
        n = self.a.large_pages
        self.snew(r, pages=n, chunks=self.a.chunks)
        self.rnew(r, pages=n)
        await self.settle(r, 60)

    # ---- run -------------------------------------------------------------

    async def one(self, r):
        await getattr(self, "sc_" + r.scenario)(r)

    async def paced(self, rooms):
        tasks = []
        t0 = time.monotonic()
        for k, r in enumerate(rooms):
            wait = t0 + k / self.a.rate - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self.one(r)))
        await asyncio.gather(*tasks)

    EXPECT = {
        "a": "success", "b": "aborted", "c": "pinned", "f": "pinned", "g": "pinned", "h": "pinned",
        "l": "success", "s": "success", "u": "aborted", "v": "aborted", "m": "pinned", "p": "pinned",
    }

    def plan(self):
        a = self.a
        if a.scenarios == ["k"]:
            kinds = a.pin_kinds.split(",")
            pins = max(1, round(a.rooms * a.pin_fraction))
            at = sorted(self.rng.sample(range(a.rooms), pins))
            out = []
            c = 0
            for i in range(a.rooms):
                if i in at:
                    kind = kinds[c % len(kinds)]
                    c += 1
                else:
                    kind = "a"
                out.append(kind)
            return out
        base = a.scenarios * a.rooms
        if a.mix_normal:
            base += ["a"] * a.mix_normal
            self.rng.shuffle(base)
        return base

    async def run(self):
        a, cfg = self.a, self.cfg
        self.truth.put(
            "run_begin", argv=sys.argv, cfg=cfg, env=self.env, uname=list(os.uname()),
            versions=self.versions(),
        )
        names = ["bootstrap", "prefill"] + [f"decode:{i}" for i in range(cfg["n_decode"])]
        procs = {n: Proc(self, n) for n in names}
        t0 = time.monotonic()
        # prefill registers with the bootstrap server while it starts (5 tries with back-off), and the
        # bootstrap server needs less time to come up, so all can start together
        for n in names:
            await procs[n].start()
        for n in names:
            await procs[n].ready()
        self.B, self.P = procs["bootstrap"], procs["prefill"]
        self.D = [procs[n] for n in names[2:]]
        table = {
            n: {"pid": p.p.pid, "rank_port": p.info.get("rank_port"), "listeners": p.info.get("listeners"),
                "session": p.info.get("session_id")}
            for n, p in procs.items()
        }
        print(json.dumps({"ready_after_s": round(time.monotonic() - t0, 1), "bootstrap_http": cfg["bootstrap_port"],
                          "truth": cfg["truth"], "procs": table}, indent=1), flush=True)
        self.truth.put("ready", procs=table)
        if a.ready_file:
            with open(a.ready_file, "w") as f:
                json.dump({"driver": os.getpid(), "bootstrap_http": cfg["bootstrap_port"],
                           "truth": cfg["truth"], "procs": table}, f)
        if a.wait_file:
            while not os.path.exists(a.wait_file):
                await asyncio.sleep(0.1)
        if a.warmup:
            w = [self.room("warmup", expect="success") for _ in range(a.warmup)]
            for r in w:
                r.decodes = self.D if cfg["decode_tp"] > 1 else r.decodes
            await asyncio.gather(*[self.sc_a(r) for r in w])
            await asyncio.sleep(0.2)
            if a.warm_file:
                open(a.warm_file, "w").close()
        if a.load_file:
            while not os.path.exists(a.load_file):
                await asyncio.sleep(0.1)
        self.truth.put("load_begin")
        s = a.scenario
        if s == "h":
            import socket

            k = socket.socket()
            k.bind(("127.0.0.1", 0))
            port = k.getsockname()[1]
            k.close()
            for d in self.D:
                d.cmd("advertise_closed_port", port=port)
                await d.called("-", "advertise_closed_port")
        kinds = self.plan()
        rooms = [self.room(k, expect=self.EXPECT[k]) for k in kinds]
        await self.paced(rooms)
        self.truth.put("load_end")
        if a.hold:
            await asyncio.sleep(a.hold)
        await self.report(procs)
        if a.held_file:
            open(a.held_file, "w").close()
        if a.end_file:
            while not os.path.exists(a.end_file):
                await asyncio.sleep(0.1)
        for p in procs.values():
            p.cmd("threads")
        await asyncio.sleep(0.3)
        await self.shutdown(procs)

    @staticmethod
    def versions():
        from importlib import metadata

        out = {}
        for n in ("sglang", "mooncake-transfer-engine-non-cuda", "nixl-cu12", "pyzmq", "torch"):
            try:
                out[n] = metadata.version(n)
            except Exception:
                out[n] = None
        return out

    async def report(self, procs):
        rows = {}
        now = clocks()["bt"]
        for r in self.rooms:
            sides = {}
            parts = [("prefill", self.P)] + [(d.name, d) for d in r.decodes]
            for name, p in parts:
                f = p.final.get(r.rid)
                last = p.last.get(r.rid)
                sides[name] = {
                    "last": STATUS.get(last), "terminal": f is not None or last in TERMINAL,
                    "final_rt": f.get("rt") if f else None, "final_bt": f.get("bt") if f else None,
                    # from room_begin to the final state, or to now when there is none
                    "open_ms": round(((f["bt"] if f else now) - (r.begin or {"bt": now})["bt"]) / 1e6, 3),
                    "reason": f.get("reason") if f else None, "kv_ok": f.get("kv_ok") if f else None,
                    "alive": p.alive,
                }
            pinned = [n for n, s in sides.items() if not s["terminal"] and s["alive"]]
            dead = [n for n, s in sides.items() if not s["terminal"] and not s["alive"]]
            finals = {s["last"] for s in sides.values() if s["terminal"]}
            if pinned:
                label = "pinned"
            elif finals == {"Success"}:
                label = "success"
            elif dead and not finals:
                label = "dead"
            elif "Failed" in finals and "Success" in finals:
                label = "split"
            else:
                label = "failed"
            self.truth.put("room", rid=r.rid, room=r.room, scenario=r.scenario, expect=r.expect, label=label,
                           pinned_sides=pinned, dead_sides=dead, sides=sides, notes=r.notes)
            key = (r.scenario, label)
            rows.setdefault(key, []).append((r, sides))
        print("scenario  label     rooms  example")
        for (sc, label), lst in sorted(rows.items()):
            r, sides = lst[0]
            ex = "; ".join(
                f"{n}={s['last']} after {s['open_ms']:.0f}ms{'' if s['terminal'] else ' (not terminal)'}"
                + (f" [{s['reason'][:110]}]" if s["reason"] else "")
                for n, s in sides.items()
            )
            print(f"{sc:9} {label:9} {len(lst):5}  room {r.room}: {ex}", flush=True)

    async def shutdown(self, procs):
        for p in procs.values():
            if p.alive:
                try:
                    os.kill(p.p.pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass
                p.cmd("quit")
        await asyncio.sleep(0.5)
        for p in procs.values():
            try:
                await asyncio.wait_for(p.p.wait(), 5)
            except asyncio.TimeoutError:
                p.kill()
                await p.p.wait()
        self.truth.put("run_end")


def free_port():
    import socket

    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    p = s.getsockname()[1]
    s.close()
    return p


def main():
    if "--role" in sys.argv:
        i = sys.argv.index("--role")
        run_role(sys.argv[i + 1], json.loads(sys.argv[sys.argv.index("--cfg") + 1]))
        return
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--scenario", required=True,
                    help="see README; several may be joined by commas, g h k go alone")
    ap.add_argument("--backend", default="mooncake", choices=["mooncake", "nixl"])
    ap.add_argument("--rooms", type=int, default=5)
    ap.add_argument("--rate", type=float, default=10.0, help="rooms per second")
    ap.add_argument("--mix-normal", type=int, default=0, help="extra normal rooms mixed in")
    ap.add_argument("--pages", type=int, default=8, help="KV pages per room")
    ap.add_argument("--large-pages", type=int, default=200000, help="scenario l")
    ap.add_argument("--chunks", type=int, default=1)
    ap.add_argument("--gap-ms", type=float, default=0)
    ap.add_argument("--slow-ms", type=float, default=30000, help="pretended prefill compute of scenario s")
    ap.add_argument("--compute-ms", type=float, default=0, help="pretended prefill compute before the first chunk")
    ap.add_argument("--race-ms", type=float, default=150)
    ap.add_argument("--decodes", type=int, default=1, help="decode processes (each one engine)")
    ap.add_argument("--page-size", type=int, default=1)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--kv-heads", type=int, default=2)
    ap.add_argument("--head-bytes", type=int, default=32)
    ap.add_argument("--mla", action="store_true")
    ap.add_argument("--policy", default="early", choices=["early", "prefill_complete"],
                    help="--disaggregation-decode-allocation-policy of both sides")
    ap.add_argument("--scatter", action="store_true", help="non-contiguous pages")
    ap.add_argument("--bootstrap-timeout", type=int, default=12)
    ap.add_argument("--waiting-timeout", type=int, default=12)
    ap.add_argument("--release-timeout", type=float, default=5)
    ap.add_argument("--pin", action="store_true", help="no timeouts: a pinned room stays pinned while the harness runs")
    ap.add_argument("--patience", type=float, default=None, help="seconds a room may take before the run moves on")
    ap.add_argument("--hold", type=float, default=0, help="keep everything running this long after the load")
    ap.add_argument("--pin-fraction", type=float, default=0.01)
    ap.add_argument("--pin-kinds", default="f,c,p")
    ap.add_argument("--warmup", type=int, default=0, help="normal rooms first (connections set up)")
    ap.add_argument("--poll-ms", type=float, default=2.0)
    ap.add_argument("--room-ids", default="random", choices=["random", "small"])
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", default=None, help="directory for truth.jsonl and logs")
    ap.add_argument("--ready-file", default=None)
    ap.add_argument("--wait-file", default=None, help="do not start the load before this file exists")
    ap.add_argument("--warm-file", default=None, help="write this file when the warmup is over (connections are open)")
    ap.add_argument("--load-file", default=None, help="hold the load, after the warmup, until this file exists")
    ap.add_argument("--held-file", default=None, help="write this file when the load and the hold are over")
    ap.add_argument("--end-file", default=None, help="keep everything running, after the hold, until this file exists")
    ap.add_argument("--debug", action="store_true")
    ap.add_argument("--netns", action="store_true", help="re-run inside a private network namespace (root)")
    ap.add_argument("--extra-env", action="append", default=[], metavar="K=V")
    a = ap.parse_args()
    if a.netns and os.environ.get("PDH_NETNS") != "1":
        os.environ["PDH_NETNS"] = "1"
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable,
                              os.path.abspath(__file__)] + sys.argv[1:])
    a.scenarios = a.scenario.split(",")
    known = "a b c f g h k l m p s u v".split()
    for s in a.scenarios:
        if s not in known:
            ap.error(f"unknown scenario {s}; known: {' '.join(known)}")
        if s in "gh" and len(a.scenarios) > 1:
            ap.error(f"scenario {s} breaks processes and has to run alone")
    out = a.out or f"pdh-{a.scenario.replace(',', '')}-{os.getpid()}"
    os.makedirs(os.path.join(out, "logs"), exist_ok=True)
    decode_tp = 2 if a.scenario == "g" else 1
    n_decode = 2 if decode_tp == 2 else a.decodes
    forever = 10**8
    bt = forever if a.pin else a.bootstrap_timeout
    wt = forever if a.pin else a.waiting_timeout
    if a.patience is None:
        a.patience = 20.0 if a.pin else max(bt, wt) + a.release_timeout + 8
    big = a.large_pages if "l" in a.scenarios else 0
    cfg = {
        "backend": a.backend, "truth": os.path.join(out, "truth.jsonl"), "logdir": os.path.join(out, "logs"),
        "bootstrap_port": free_port(), "http_port": free_port(), "layers": a.layers, "kv_heads": a.kv_heads,
        "head_bytes": a.head_bytes, "page_size": a.page_size, "mla": a.mla, "policy": a.policy, "scatter": a.scatter,
        "pool_pages": max(8192, 2 * big, 64 * a.pages), "aux_slots": 1024, "poll_ms": a.poll_ms,
        "decode_tp": decode_tp, "n_decode": n_decode, "release_timeout": a.release_timeout, "proctitle": True,
    }
    env = {
        "SGLANG_HOST_IP": "127.0.0.1",  # what SGLang binds its control sockets to
        "CUDA_VISIBLE_DEVICES": "",
        "MOONCAKE_PROTOCOL": "tcp",  # SGLang: protocol passed to TransferEngine.initialize
        "MC_FORCE_TCP": "1",  # Mooncake: TCP transport only
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(bt),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(wt),
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2.0",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(a.release_timeout),
        "PDH_DEBUG": "1" if a.debug else "0",
        "PYTHONUNBUFFERED": "1",
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "no_proxy": "127.0.0.1",
    }
    if a.backend == "nixl":
        site = os.environ.get("NIXL_SITE", "nixl_site")  # pip install --no-deps --target ... nixl nixl-cu13
        env["PYTHONPATH"] = os.pathsep.join(x for x in (site, os.environ.get("PYTHONPATH")) if x)
    for kv in a.extra_env:
        k, v = kv.split("=", 1)
        env[k] = v
    H = Harness(a, cfg, env)
    asyncio.run(H.run())


if __name__ == "__main__":
    main()
