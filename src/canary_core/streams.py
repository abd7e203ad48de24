"""What the host may do on a device's streams just now."""

import torch


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may be read on the host then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    """Waits for all that was issued to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
