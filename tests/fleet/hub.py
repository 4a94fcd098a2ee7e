"""A stand-in of a model hub with one model, which only the holder of a token that stands nowhere else may read.

python tests/fleet/hub.py ADDRESS PORT CERTIFICATE KEY HOLD

It speaks TLS; while the file HOLD is there, weights are not sent.
"""

import hashlib
import json
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SENTINEL = "hf_SENTINEL_that_stands_nowhere_9Zq4"
REPOSITORY = "Qwen/Qwen3-0.6B"
REVISION = "c1899de289a04d12100db370d81485cdf75e47ca"
CONFIG = json.dumps(
    {"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512, "num_attention_heads": 8,
     "torch_dtype": "bfloat16", "model_type": "llama"}
).encode()  # fmt: skip
WEIGHTS = b"weights"


class Hub(BaseHTTPRequestHandler):
    """Answers as a hub does: the list of a revision's files, and the files."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """401 without the token."""
        if self.headers.get("Authorization") != f"Bearer {SENTINEL}":
            self.send_error(401)
            return
        git = hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest()
        told = {"sha": REVISION, "siblings": [
            {"rfilename": "config.json", "size": len(CONFIG), "blobId": git},
            {"rfilename": "model.safetensors", "size": len(WEIGHTS), "blobId": "x",
             "lfs": {"sha256": hashlib.sha256(WEIGHTS).hexdigest(), "size": len(WEIGHTS)}},
        ]}  # fmt: skip
        bodies = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        while self.path.endswith("safetensors") and Path(sys.argv[5]).exists():
            time.sleep(0.1)
        body = json.dumps(told).encode() if "/api/" in self.path else bodies[self.path.rsplit("/", 1)[1]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Hub)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[3], sys.argv[4])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
