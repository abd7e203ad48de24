"""vLLM's platform of CPUs, as one that Ray may place workers on: on GPUs, of which the cluster is told that it has
some. vLLM takes it by its group of entry points for platforms."""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """Asynchronous scheduling stays what was asked for, too."""

    ray_device_key = "GPU"

    @classmethod
    def check_and_update_config(cls, vllm_config):
        """See the base class."""
        asked = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked


def name() -> str:
    """vLLM asks in each of its processes."""
    return f"{__name__}.{RayCpuPlatform.__qualname__}"
