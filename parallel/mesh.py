"""The mesh: which ranks shard, replicate, and split sequences and matrices; and this process's place in it."""

from dataclasses import dataclass

import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake": see build_mesh()
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import config

MESH_DIMS = ("dp_replicate", "dp_shard", "cp", "tp")  # outermost first: tp ranks are adjacent


@dataclass(frozen=True)
class World:
    """This process, its device and the mesh. The cp and tp ranks of one data-parallel rank process the same samples:
    to split or average over samples, use dp_rank and dp_size, not rank and size."""

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
        """Ranks that FSDP2 averages gradients over: not tp's, which have one loss."""
        return self.dp_size * self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.cp * self.tp)


def build_mesh(device_type: str, shape: tuple[int, int, int, int]) -> DeviceMesh:
    # A dimension of size 1 would still create one process group per rank, with sockets of its own. No collective ever
    # runs over cp or tp of 1: the backend of torch's own tests, which communicates with nobody, does for them.
    alone: dict = {
        name: "fake"
        for name, degree in zip(MESH_DIMS, shape)
        if degree == 1 and name in ("cp", "tp")
    }
    return init_device_mesh(device_type, shape, mesh_dim_names=MESH_DIMS, backend_override=alone)


def fsdp_mesh(world: World) -> DeviceMesh:
    """The mesh for FSDP2: dp_shard flattened with cp, because cp does not shard parameters. HSDP puts dp_replicate in
    front of it; a dp_replicate of 1 is left out, because it would cost an all-reduce over one rank."""
    shards = (
        world.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        if world.cp > 1
        else world.mesh["dp_shard"]
    )
    return (
        DeviceMesh._concatenate([world.mesh["dp_replicate"], shards])
        if world.dp_replicate > 1
        else shards
    )


def storage_device(cfg: config.Config, world: World) -> torch.device:
    """Where parameters, gradients and optimizer state are stored between steps."""
    return torch.device("cpu") if cfg.parallel.cpu_offload else world.device


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return found.get("avx512_bf16", False) or found.get("amx_bf16", False)
