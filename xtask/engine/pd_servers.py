#!/usr/bin/env python3
"""Two complete SGLang servers (prefill, decode) on the CPU with a tiny model, their router, and clients.

Takes the same files as pd_harness.py to go on by: `--ready-file` is written when all is up, then `--wait-file` is
awaited; `--warm-file` when a few requests have opened the connections, then `--load-file`; `--held-file` when the load is
over and its pin has stood for `--hold` seconds, then `--end-file`.

Writes `truth.jsonl` into `--out`: one `request` row for each request and one `room` row for each room, as their client
knows them; a room through the router has no number there (the router draws it), and is known by its request's id.

Scenarios of the load: `a` both servers answer (also streamed, a megabyte of text, under a pause of `--pause` seconds, and
behind a decode server without free KV memory); `r` the same through the router; `x` refused by both as too long; `v` the client
hangs up on both sides at moments of its own; `y` it hangs up at decode and prefill never gets the request; `w` prefill gets it
seconds after the hang-up, and that client hangs up as well; `c` prefill gets it seconds after the hang-up and holds it.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
UP_WITHIN = 600  # seconds


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def write_model(path):
    """A two-layer Llama of random weights, and a tokenizer for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    os.makedirs(path, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "attention_bias": False, "mlp_bias": False,
    }
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "model_max_length": 4096,
        },
    }
    for name, content in files.items():
        with open(os.path.join(path, name), "w") as f:
            json.dump(content, f)
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet)
    t.train_from_iterator(["prefill and decode talk about rooms"], trainer)
    t.save(os.path.join(path, "tokenizer.json"))


class Servers:
    """The processes."""

    def __init__(self, a):
        self.a = a
        self.processes = {}
        self.logs = []

    def environment(self):
        sites = [os.path.join(HERE, "shims"), self.a.extra_site, os.environ.get("NIXL_SITE", "")]
        return {
            **os.environ,
            "PYTHONPATH": ":".join(s for s in sites if s),
            "SGLANG_USE_CPU_ENGINE": "1",
            # The address of the rank ports.
            "SGLANG_HOST_IP": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
            "MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1",
            "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "NIXL_VRAM_IS_DRAM": "1",
            # Page indices go as a plain array, not through a CUDA event and pinned memory.
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1",
            "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost",
        }

    def start(self, name, arguments):
        log = open(os.path.join(self.a.out, name + ".log"), "w")
        self.processes[name] = subprocess.Popen(
            [sys.executable, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=self.environment(), preexec_fn=die_with_parent, start_new_session=True)

    def serve(self, mode, port):
        a = self.a
        model = os.path.join(a.out, "model")
        self.start(mode, [
            "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu", "--load-format", "dummy",
            "--random-seed", "1", "--attention-backend", "torch_native", "--cuda-graph-backend-decode=disabled",
            "--cuda-graph-backend-prefill=disabled", "--disable-overlap-schedule", "--mem-fraction-static", "0.2",
            "--max-total-tokens", "8192", "--context-length", "2048", "--max-running-requests", "256",
            "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--disaggregation-mode", mode,
            "--disaggregation-transfer-backend", a.backend, "--disaggregation-bootstrap-port", str(a.bootstrap_port),
            "--enable-metrics", "--log-level", "info",
            *(["--enable-trace", "--otlp-traces-endpoint", a.otlp, "--trace-modules", "request"] if a.otlp else []),
            *(["--disaggregation-decode-retraction-backup", "cpu_tensor"] if mode == "decode" else [])])

    def up(self):
        a = self.a
        write_model(os.path.join(a.out, "model"))
        self.serve("prefill", a.prefill_port)
        self.serve("decode", a.decode_port)
        end = time.monotonic() + UP_WITHIN
        for name in ("prefill", "decode"):
            path = os.path.join(a.out, name + ".log")
            while "ready to roll" not in open(path, errors="replace").read():
                self.alive(name)
                if time.monotonic() > end:
                    sys.exit(f"{name} is not ready after {UP_WITHIN} s; see {path}")
                time.sleep(0.5)
        self.start("router", [
            "-m", "sglang_router.launch_router", "--pd-disaggregation",
            "--prefill", f"http://127.0.0.1:{a.prefill_port}", str(a.bootstrap_port),
            "--decode", f"http://127.0.0.1:{a.decode_port}", "--host", "127.0.0.1", "--port", str(a.router_port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(a.router_port + 1), "--policy", "random"])
        import urllib.request
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{a.router_port}/health", timeout=5).read()
                return
            except OSError:
                self.alive("router")
                if time.monotonic() > end:
                    sys.exit("the router is not ready")
                time.sleep(0.5)

    def alive(self, name):
        status = self.processes[name].poll()
        if status is not None:
            sys.exit(f"{name} ended with {status}; see {self.a.out}/{name}.log")

    def down(self):
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Clients:
    def __init__(self, a, session):
        self.a, self.s = a, session
        self.rng = random.Random(a.seed)
        self.fd = os.open(os.path.join(a.out, "truth.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.urls = {
            "prefill": f"http://127.0.0.1:{a.prefill_port}", "decode": f"http://127.0.0.1:{a.decode_port}",
            "router": f"http://127.0.0.1:{a.router_port}"}
        self.open = {}

    def put(self, kind, **fields):
        os.write(self.fd, (json.dumps({"kind": kind, "rt": time.time_ns(), **fields}) + "\n").encode())

    def new(self, tag, tokens=40, answer=8, stream=False, routed=False):
        room = self.rng.randrange(2**53, 2**63)
        body = {
            "input_ids": [self.rng.randrange(10, 400) for _ in range(tokens)], "rid": f"{tag}-{room}", "stream": stream,
            "sampling_params": {"max_new_tokens": answer, "temperature": 0, "ignore_eos": True}}
        if not routed:
            body.update(bootstrap_host="127.0.0.1", bootstrap_port=self.a.bootstrap_port, bootstrap_room=room)
        return body

    async def post(self, side, body, patience=None):
        """Sends a request; hangs up when patience is over. Returns the status, or None."""
        row = {"room": body.get("bootstrap_room"), "rid": body["rid"], "side": side, "streamed": body["stream"],
               "port": int(self.urls[side].rsplit(":", 1)[1]), "begin_rt": time.time_ns(), "first_byte_rt": None,
               "end": "open", "status": None, "end_rt": None}
        self.open[id(row)] = row
        # A connection of its own: to hang up is to close it.
        import aiohttp
        try:
            timeout = aiohttp.ClientTimeout(total=patience)
            async with self.s.post(self.urls[side] + "/generate", json=body, timeout=timeout) as r:
                async for _ in r.content.iter_any():
                    row["first_byte_rt"] = row["first_byte_rt"] or time.time_ns()
                row.update(end="answered", status=r.status)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            row.update(end="hung_up")
        except aiohttp.ClientError as e:
            row.update(end="broken", error=str(e))
        row["end_rt"] = time.time_ns()
        del self.open[id(row)]
        self.put("request", **row)
        return row["status"]

    def room(self, scenario, body, sides, label=None):
        self.put("room", scenario=scenario, room=body.get("bootstrap_room"), rid=body["rid"], label=label, sides=sides)

    async def pair(self, scenario, prefill=None, decode=None, **how):
        """Both servers at once, as a router asks them."""
        body = self.new(scenario, **how)
        got = await asyncio.gather(
            self.post("prefill", {**body, "stream": False}, prefill), self.post("decode", body, decode))
        label = "success" if list(got) == [200, 200] else "failed"
        over = {"terminal": True, "last": "Success" if label == "success" else "Failed"}
        self.room(scenario, body, {"prefill": over, "decode": over}, label)
        return got

    async def routed(self):
        body = self.new("r", routed=True)
        got = await self.post("router", body)
        self.room("r", body, {}, "success" if got == 200 else "failed")
        return got

    async def control(self, path, **body):
        async with self.s.post(self.urls["prefill"] + path, json=body) as r:
            assert r.status == 200, f"{path}: {r.status} {await r.text()}"

    async def warm(self):
        got = await asyncio.gather(*[self.pair("warmup") for _ in range(2)])
        assert got == [[200, 200]] * 2, f"the servers do not answer: {got}"

    async def load(self):
        a = self.a
        await asyncio.gather(*[self.pair("a") for _ in range(8)])
        await asyncio.gather(*[self.routed() for _ in range(12)])
        await asyncio.gather(*[self.pair("a", stream=True, answer=60) for _ in range(4)])
        await asyncio.gather(*[self.pair("x", tokens=5000) for _ in range(2)])
        big = self.new("a")
        del big["input_ids"]
        # The router writes the room behind the text, and refuses nothing: too long for the model.
        big = {"text": "word " * 250_000, **big}
        got = await asyncio.gather(self.post("prefill", big), self.post("decode", big))
        over = {"terminal": True, "last": "Failed"}
        self.room("x", big, {"prefill": over, "decode": over}, f"{got}")
        # A burst of clients that hang up.
        burst = []
        for _ in range(a.hang_ups):
            patience = lambda: self.rng.uniform(0.003, 0.6)
            burst.append(asyncio.create_task(self.pair(
                "v", patience(), patience(), tokens=self.rng.choice([40, 400, 1200]), answer=self.rng.choice([8, 100]))))
            await asyncio.sleep(self.rng.uniform(0, 0.1))
        await asyncio.gather(*burst)
        await asyncio.sleep(8)
        await self.control("/pause_generation", mode="in_place")
        paused = [asyncio.create_task(self.pair("a", tokens=100)) for _ in range(6)]
        await asyncio.sleep(a.pause)
        await self.control("/continue_generation")
        await asyncio.gather(*paused)
        # Decode's KV memory is full.
        full = [asyncio.create_task(self.pair("a", tokens=1000, answer=900, stream=True)) for _ in range(9)]
        await asyncio.sleep(5)
        held, given_up, never = (self.new(tag, tokens=1500, answer=200) for tag in "cwy")
        await asyncio.gather(*[self.post("decode", b, 0.7) for b in (held, given_up, never)])
        both = asyncio.create_task(self.pair("v", 0.7, 0.7, tokens=1500, answer=200))
        # Decode's scheduler sends its ABORT when it comes to it.
        await asyncio.sleep(10)
        begun = time.monotonic()
        pin = asyncio.create_task(self.post("prefill", held))
        await self.post("prefill", given_up, 3)
        await both
        over = {"terminal": True, "last": "Failed"}
        self.room("w", given_up, {"prefill": over, "decode": over}, "failed")
        self.room("y", never, {"decode": over}, "failed")
        await asyncio.gather(*full)
        await asyncio.gather(*[self.pair("a") for _ in range(6)])
        await asyncio.sleep(max(a.hold, begun + 25 - time.monotonic()))
        stuck = not pin.done()
        if not stuck:
            sys.exit(f"prefill has ended the request that was to be pinned (its time-out is 300 s, and the load took "
                     f"{time.monotonic() - begun:.0f} s after it): this machine is too slow or too busy for the case")
        side = {"terminal": False, "alive": True, "last": "Bootstrapping", "open_ms": (time.monotonic() - begun) * 1e3}
        self.room("c", held, {"prefill": side, "decode": over}, "pinned")
        return pin


async def drive(a, servers):
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        clients = Clients(a, session)
        await clients.warm()
        touch(a.warm_file)
        await wait_for(a.load_file, servers)
        pin = await clients.load()
        for row in list(clients.open.values()):
            clients.put("request", **row)
        clients.put("load_end")
        touch(a.held_file)
        await wait_for(a.end_file, servers)
        pin.cancel()


def touch(path):
    if path:
        open(path, "w").close()


async def wait_for(path, servers):
    while path and not os.path.exists(path):
        for name in servers.processes:
            servers.alive(name)
        await asyncio.sleep(0.1)


def scheduler_of(pid):
    """The scheduler among an engine's children."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as f:
                comm, rest = f.read().rsplit(")", 1)
        except OSError:
            continue
        if int(rest.split()[1]) == pid and comm.endswith("(sglang::schedul"):
            return int(entry)
    return None


def listeners(pids):
    """Ports that processes listen on."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as f:
            for line in list(f)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True, help="directory for truth.jsonl, logs and the model")
    ap.add_argument("--extra-site", default="", help="where sglang-router and the OpenTelemetry packages are")
    ap.add_argument("--backend", default="mooncake", choices=["mooncake", "nixl"])
    ap.add_argument("--prefill-port", type=int, default=31000)
    ap.add_argument("--decode-port", type=int, default=31001)
    ap.add_argument("--router-port", type=int, default=31080)
    ap.add_argument("--bootstrap-port", type=int, default=31998)
    ap.add_argument("--otlp", default=None, help="HOST:PORT that the servers send their spans to")
    ap.add_argument("--hang-ups", type=int, default=24, help="clients of the burst")
    ap.add_argument("--pause", type=float, default=120, help="seconds that prefill stands still")
    ap.add_argument("--hold", type=float, default=10, help="seconds without any request at the end")
    ap.add_argument("--seed", type=int, default=None)
    for name in ("ready", "wait", "warm", "load", "held", "end"):
        ap.add_argument(f"--{name}-file", default=None)
    a = ap.parse_args()
    die_with_parent()
    os.makedirs(a.out, exist_ok=True)
    servers = Servers(a)
    try:
        servers.up()
        procs = {}
        for name, process in servers.processes.items():
            pids = [process.pid, scheduler_of(process.pid)]
            pids = [p for p in pids if p]
            procs[name] = {"pid": process.pid, "scheduler": pids[-1], "listeners": listeners(pids)}
        if a.ready_file:
            with open(a.ready_file + ".new", "w") as f:
                json.dump({"procs": procs}, f)
            os.rename(a.ready_file + ".new", a.ready_file)
        asyncio.run(wait_for(a.wait_file, servers))
        asyncio.run(drive(a, servers))
    finally:
        servers.down()


if __name__ == "__main__":
    main()
