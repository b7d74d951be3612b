"""The first node of a job, through which the others find each other."""

import errno
import os
import socket
from collections.abc import Iterator

import config
from extras.preflight.finding import Finding, error, warning
from run.command import Ranks, first_host, rendezvous_port

CONNECT_SECONDS = 3.0


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
            socket.create_connection(reachable, CONNECT_SECONDS).close()
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
