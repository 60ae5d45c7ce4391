"""A GPU that is a file: who holds how many bytes of it. Programs that stand in for a vLLM server
and for a deployment take theirs from it, as the real ones take theirs from a driver.

    python stub_gpu.py LEDGER vllm BYTES SOCKET     sleeps and wakes like vLLM's server
    python stub_gpu.py LEDGER deployment FOLDER     once the file `load` is in the home
"""

import fcntl
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[2])]


class StubGpu:
    """The device behind a ledger file."""

    def __init__(self, ledger: Path, total: int = 0) -> None:
        self.ledger = ledger
        if total:
            ledger.write_text(json.dumps({"total": total, "held": {}}))

    def take(self, holder: str, size: int) -> bool:
        """Hold so many bytes from now on; False, and nothing changed, where they are not free."""
        with open(self.ledger, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            others = sum(held for name, held in state["held"].items() if name != holder)
            if others + size > state["total"]:
                return False
            state["held"][holder] = size
            file.seek(0)
            # In one write of one length: a holder that is killed in between leaves no empty file.
            file.write(json.dumps(state).ljust(4096))
        return True

    @property
    def free(self) -> int:
        with open(self.ledger) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            state = json.load(file)
        return state["total"] - sum(state["held"].values())


ASLEEP = 100  # bytes that a sleeping server keeps


def serve_vllm(gpu: StubGpu, size: int, address: str) -> None:
    """vLLM's routes by `fake_vllm.py`, with memory that is taken at the start and on waking."""
    import fake_vllm

    if not gpu.take("sampler", size):
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")

    class Handler(fake_vllm.Handler):
        def do_POST(self) -> None:
            if self.path.startswith("/sleep"):
                gpu.take("sampler", ASLEEP)
            elif self.path == "/wake_up" and not gpu.take("sampler", size):
                return self.reply(500, {"error": "CUDA out of memory"})
            return super().do_POST()

    fake_vllm.Server(address, Handler).serve_forever()


def serve_deployment(gpu: StubGpu, folder: Path) -> int:
    """A deployment by `fake_server.py` that takes what it was granted once it may load."""
    import fake_server

    from engine.core.files import read_json, write_json
    from engine.home.run_dir import DeployDir

    deployment = DeployDir(folder)
    while not (deployment.home.root / "load").exists():
        time.sleep(0.01)
    if not gpu.take(folder.name, read_json(deployment.config)["memory_bytes"]):
        write_json(deployment.failed, {"message": "CUDA out of memory"})
        return 3
    sys.argv = ["fake_server.py", str(folder)]
    try:
        return fake_server.main()
    finally:
        gpu.take(folder.name, 0)


if __name__ == "__main__":
    stub = StubGpu(Path(sys.argv[1]))
    if sys.argv[2] == "vllm":
        serve_vllm(stub, int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(serve_deployment(stub, Path(sys.argv[3])))
