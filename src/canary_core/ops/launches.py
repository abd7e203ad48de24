"""`LaunchCache`: what the back ends remember of a region, so that a forward costs the host as little as can be."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canary_core.ops.kernels.fingerprint import Launch
    from canary_core.ops.kernels.launch import BatchArguments, Launcher, TableConstants
    from canary_core.ops.reference.fingerprint import Stack


class LaunchCache:
    """What was worked out for launches on one region. Addresses of the region's tensors are among it: whoever puts
    another tensor in the place of one must call `clear`.

    launchers: by op and compile-time constants. byte_launches: the same for ops that read bytes, which need one launch
    for each group of sources. batch: the kernels' arguments of the last batch, which several ops of a forward take.
    stacks: the torch reference's view of the sources, None until it is needed.
    """

    __slots__ = ("batch", "byte_launches", "launchers", "stacks")

    def __init__(self) -> None:
        self.launchers: dict[tuple[str, TableConstants | None], Launcher] = {}
        self.byte_launches: dict[tuple[str, TableConstants | None], list[Launch]] = {}
        self.batch: BatchArguments | None = None
        self.stacks: tuple[Stack, ...] | None = None

    def clear(self) -> None:
        """Forgets everything: a tensor of the region was replaced, or a source has another shape."""
        self.launchers.clear()
        self.byte_launches.clear()
        self.batch = None
        self.stacks = None

    def rebound(self) -> None:
        """Sources of the same shapes have other addresses: kernels read these on the device, the reference doesn't."""
        self.stacks = None
