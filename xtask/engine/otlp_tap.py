#!/usr/bin/env python3
"""Stands between the servers' span exporters and the agent, and behind the agent: takes down what each request held.

Requests to `--tap` are handed on to `--agent` as they are and answered as the agent answers; requests to `--sink` are answered
at once. Each request that was taken is one line `WHERE LENGTH SHA256` in `--out`, of its message before any compression.
"""

import argparse
import ctypes
import hashlib
import signal
import threading
from concurrent import futures

import grpc

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Taker(grpc.GenericRpcHandler):
    def __init__(self, where, out, lock, onward=None):
        self.where, self.out, self.lock = where, out, lock
        same = lambda b: b
        # An agent that comes later is found at once: by default a channel waits up to two minutes between attempts.
        at_once = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 500)]
        self.onward = onward and grpc.insecure_channel(onward, at_once).unary_unary(
            METHOD, request_serializer=same, response_deserializer=same)

    def service(self, details):
        if details.method != METHOD:
            return None
        # No serializers: the messages' bytes.
        return grpc.unary_unary_rpc_method_handler(self.take)

    def take(self, message, context):
        answer = b""
        if self.onward:
            try:
                answer = self.onward(message, timeout=10)
            except grpc.RpcError as e:
                context.abort(e.code(), e.details())
        with self.lock:
            print(self.where, len(message), hashlib.sha256(message).hexdigest(), file=self.out, flush=True)
        return answer


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tap", "sink", "agent", "out"):
        ap.add_argument(f"--{name}", required=True)
    a = ap.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    servers, lock = [], threading.Lock()
    out = open(a.out, "a")
    for where, address, onward in (("tap", a.tap, a.agent), ("sink", a.sink, None)):
        # By default a message may have 4 MiB; the agent takes more.
        server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers([Taker(where, out, lock, onward)])
        assert server.add_insecure_port(address), f"cannot listen on {address}"
        server.start()
        servers.append(server)
    servers[0].wait_for_termination()


if __name__ == "__main__":
    main()
