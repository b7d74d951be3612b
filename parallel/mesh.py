"""The device mesh: which ranks replicate, shard, split sequences and split matrices."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake" for build_mesh()
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import config

# Outermost first, so that tp ranks are adjacent.
MESH_DIMS = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class World:
    """This process, its device and the mesh.

    All cp and tp ranks of a data-parallel rank process the same samples. To split samples or to
    average over them, use dp_rank and dp_size, not rank and size.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # always has all four dimensions of MESH_DIMS

    @property
    def dp_replicate(self) -> int:
        return self.mesh.size(0)

    @property
    def dp_shard(self) -> int:
        return self.mesh.size(1)

    @property
    def cp(self) -> int:
        return self.mesh.size(2)

    @property
    def tp(self) -> int:
        return self.mesh.size(3)

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """The number of ranks that FSDP2 averages gradients over. tp ranks share a loss, so they do
        not count."""
        return self.dp_size * self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.cp * self.tp)


def build_mesh(device_type: str, shape: tuple[int, int, int, int]) -> DeviceMesh:
    """The mesh of this shape, with the dimensions MESH_DIMS."""
    backends: dict = {}
    # torch's debug mode wraps every group, which the backend "fake" does not support.
    is_debugging = dist.get_debug_level() == dist.DebugLevel.DETAIL
    for name, degree in zip(MESH_DIMS, shape):
        if name in ("cp", "tp") and degree == 1 and not is_debugging:
            # By default each rank would open a group of one rank, with sockets, that never runs a
            # collective. "fake" is torch's backend for tests, which does not communicate.
            backends[name] = "fake"
    return init_device_mesh(device_type, shape, mesh_dim_names=MESH_DIMS, backend_override=backends)


def fsdp_mesh(world: World) -> DeviceMesh:
    """The mesh for FSDP2: (shards,), or (replicas, shards) for HSDP.

    The shard dimension is dp_shard flattened with cp, because cp does not shard parameters itself.
    """
    shards = world.mesh["dp_shard"]
    if world.cp > 1:
        shards = world.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if world.dp_replicate == 1:
        return shards  # a dimension of size 1 would cost an all-reduce over one rank
    return DeviceMesh._concatenate([world.mesh["dp_replicate"], shards])


def storage_device(p: config.Parallel, world: World) -> torch.device:
    """Where parameters, gradients and optimizer state are stored between steps."""
    return torch.device("cpu") if p.cpu_offload else world.device


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 without emulation."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
