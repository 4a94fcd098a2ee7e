"""vLLM's OffloadingConnector on the CPU platform, by an out-of-tree offloading specification.

vLLM's own specification refuses a platform without a GPU because its worker copies over CUDA streams. This one keeps
everything else of it (the scheduler's manager, eviction, counters) and replaces the worker by a copy from host memory
to host memory. There is no PCIe and no overlap with computing: what moves is real, how long it takes says nothing
about a GPU.

Use it with `"spec_name": "HostOffloadingSpec", "spec_module_path": "kvtrial_host_offload"` in
`kv_connector_extra_config`. With `KVTRIAL_HOST_OFFLOAD_CORRUPT=1` every load plants zeros instead of the stored bytes,
which a check of the answers has to notice.
"""

from kvtrial_host_offload.spec import HostOffloadingSpec
from kvtrial_host_offload.worker import CORRUPT_VARIABLE, HostCopyWorker

__all__ = ["CORRUPT_VARIABLE", "HostCopyWorker", "HostOffloadingSpec"]
