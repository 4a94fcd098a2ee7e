"""The specification that vLLM's OffloadingConnector asks for a manager and a worker."""

import vllm
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtrial_host_offload.worker import HostCopyWorker

SUPPORTED_RELEASE = "0.32."


class HostOffloadingSpec(CPUOffloadingSpec):
    """CPUOffloadingSpec with a worker that copies inside host memory. Written against vLLM 0.32.

    vLLM announces this interface as experimental, so another release is refused rather than tried.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        if not vllm.__version__.startswith(SUPPORTED_RELEASE):
            raise RuntimeError(
                f"HostOffloadingSpec was written for vLLM {SUPPORTED_RELEASE}x and this is vLLM {vllm.__version__}; "
                "install the vLLM that the lock file pins."
            )
        super().__init__(config)
        self._host_worker: HostCopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The one worker of this engine process. `kv_caches`: the engine's KV tensors and how layers refer to them."""
        if self._host_worker is None:
            self._host_worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._host_worker
