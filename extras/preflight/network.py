"""The hub, and the first node of a job, through which the others find each other."""

import errno
import os
import pathlib
import socket
from collections.abc import Iterator
from dataclasses import replace

from data.folder_names import is_prepared
from data.hub_sources import not_local
from data.identity import reads_hub

import config
from data import hub
from extras.preflight.finding import Finding, error, warning
from run.command import Ranks, first_host, rendezvous_port


def hub_answers(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Where text is still to be read from it."""
    names = remote_sources(cfg)
    if not names or is_prepared(cfg):
        return
    try:
        from huggingface_hub import constants
    except ImportError:  # whoever needs it reports that
        return
    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else hub.connection_problem()
    if not problem:
        return
    cache = pathlib.Path(constants.HF_HUB_CACHE)
    missing = []
    for name in names:
        if not (cache / f"datasets--{name.replace('/', '--')}").exists():
            missing.append(name)
    if missing:
        yield error(
            f"[data] source = {not_local(missing[0])}: {problem}, and {cache} has none of it; "
            f"{hub.how_to_fetch()}"
        )
    elif not constants.HF_HUB_OFFLINE:  # else it is meant so
        yield warning(
            f"[data] source = {names[0]}: {problem}; what {cache} lacks of it is needed: "
            f"{hub.how_to_fetch()}"
        )


def remote_sources(cfg: config.Config) -> list[str]:
    """The sources of text that are datasets of the hub."""
    d = cfg.data
    names = [source.source for source in d.sources] or [d.source]
    return [name for name in names if reads_hub(replace(d, source=name))]


def first_node(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """A job's other nodes connect to its first, which runs this process, by the name that SLURM has
    for it."""
    if ranks.nodes == 1 or not ranks.job:
        return
    name = first_host(os.environ.get("SLURM_JOB_NODELIST", ""))
    port = rendezvous_port(ranks.job)
    where = f"SLURM_JOB_NODELIST: the first node, {name},"
    if name == "localhost" or name.startswith("127."):
        yield error(f"{where} is each node's name for itself; nodes need names of their own")
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        yield error(
            f"{where} has no address: {problem.strerror}; the nodes need it in DNS or /etc/hosts"
        )
        return
    try:
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            reachable = (str(address[0]), listener.getsockname()[1])
            socket.create_connection(reachable, hub.CONNECT_SECONDS).close()
    except OSError as problem:
        if problem.errno == errno.EADDRNOTAVAIL:
            yield warning(
                f"{where} has the address {address[0]}, which is not one of this machine: "
                f"{socket.gethostname()}; the nodes need the right one in DNS or /etc/hosts"
            )
            return
        cure = "a firewall must let them through"
        if problem.errno == errno.EADDRINUSE:
            cure = "another program listens there; submit again, for another job id"
        yield error(f"{where} has no port {port} for the others: {problem.strerror}; {cure}")
