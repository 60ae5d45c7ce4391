"""Functions captured as CUDA graphs, which share one stream and one pool of memory.

torch gives each graph memory of its own, and keeps the memory of each stream apart. What a graph
that is gone had taken stays reserved until memory runs out: on an H200 a run of GRPO had 27.6 GB
reserved after its first step and 30.1 GB after its fourth. In one pool the next graph takes the
memory of the last one.
"""

from collections.abc import Callable

import torch

Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Captures:
    """Captures graphs on the current GPU. They are replayed one after the other, on one stream:
    what they compute on the way may lie in the same memory."""

    def __init__(self) -> None:
        """Make the stream and the pool."""
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # torch gives a pool up with its last graph. This one does nothing and stays.
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first, pool=self.pool, stream=self.stream):
            self._of_first = torch.ones(1, device="cuda")

    def capture(self, step: Step) -> "CapturedStep":
        """Run `step` once and then capture it."""
        # The first run is outside of the capture, because libraries set themselves up in it, and on
        # another stream than the current one, as torch asks.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            out = step()
        return CapturedStep(graph, out)


class CapturedStep:
    """A step captured as a CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep the graph, and the tensors that its step returned while it was captured."""
        self._graph = graph
        self._out = out

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step once more. It reads the same tensors as when it was captured, with the
        numbers they hold now. Returns the tensors that it returned then, with new values."""
        self._graph.replay()
        return self._out
