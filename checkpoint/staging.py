"""async_save: training waits only until the shards are copied to host memory, and they are written from there."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def staged(
    tensors: dict[str, Tensor], buffers: dict[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Copies the tensors to host memory, sharded as they are. The next save reuses the buffers: faulting in fresh pages
    would take as long as the copy itself."""
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    for name, t in local.items():
        if name not in buffers:
            held = buffers[name] = torch.empty_like(t, device="cpu")
            if t.is_cuda and held.nbytes:
                # pinned in place: torch's pinned allocator rounds up to powers of two
                torch.cuda.check_error(
                    # pyrefly: ignore[missing-attribute]  # cudart() is not None with a GPU
                    torch.cuda.cudart().cudaHostRegister(held.data_ptr(), held.nbytes, 0)
                )
        buffers[name].copy_(t, non_blocking=True)
    torch.get_device_module(device).synchronize()  # of torch.cpu: does nothing
    # Not DTensor.from_local: that would move the copy back to the mesh's device.
    return {
        name: DTensor(buffers[name], t._spec, requires_grad=False)
        if isinstance(t, DTensor)
        else buffers[name]
        for name, t in tensors.items()
    }
