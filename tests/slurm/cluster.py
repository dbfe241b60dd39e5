"""A SLURM cluster of several nodes on this machine, for tests: ``python -m tests.slurm.cluster up`` and ``down``.

Everything lives in one folder and in processes; ``down`` leaves nothing behind. Each node is a slurmd in a UTS and a
mount namespace of its own, so it has its own host name; all of them share this machine's cores and memory, and claim
more cores than there are. Debian's packages are used, and no systemd. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "slurm-wlm munge"
ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "unshare")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
NODES = 4
CPUS_PER_NODE = 4
MAX_ARRAY_SIZE = 101
"""Small, so that few runs need several arrays."""
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_WAIT_S = 60.0


class Unusable(Exception):
    """There can't be a cluster here. ``str()`` says why and what to do, in one line."""


def missing(accounting: bool = False) -> str | None:
    """Why there can't be a cluster here; None if there can."""
    wanted = (*PROGRAMS, *ACCOUNTING_PROGRAMS) if accounting else PROGRAMS
    absent = [name for name in wanted if shutil.which(name, path=_PATH) is None]
    if absent:
        packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}" if accounting else PACKAGES
        return (
            f"SLURM is not installed ({', '.join(absent)} not found); on Debian and Ubuntu: "
            f"apt-get install -y --no-install-recommends {packages}"
        )
    if os.geteuid() != 0:
        return "a SLURM cluster on one machine needs root, for nodes with host names of their own"
    if subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True).returncode != 0:
        return "this machine lets nobody make namespaces (unshare -m -u); a container needs CAP_SYS_ADMIN for it"
    return None


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"optimus_cc_slurm_{os.geteuid()}"


@dataclass(frozen=True)
class Cluster:
    """The cluster in a folder, up or not."""

    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """What lets SLURM's commands find this cluster."""
        return {"SLURM_CONF": str(self.conf), "PATH": _PATH}

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, NODES + 1)]

    @property
    def is_up(self) -> bool:
        if not self.conf.exists():
            return False  # SLURM's commands would wait a minute for it
        try:
            states = self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()
        except (OSError, subprocess.SubprocessError):
            return False
        return len(states) >= NODES and all(state.rstrip("*~") in ("idle", "mixed", "allocated") for state in states)

    def run(self, *command: str, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        """One of SLURM's commands; ``more``: variables."""
        env = {**os.environ, **self.env, **more}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=check)

    # Up.

    def up(self, accounting: bool = False) -> None:
        """Start it; nothing happens if it is up.

        Raises:
            Unusable: it can't be started here; nothing is left of it.
        """
        if (reason := missing(accounting)) is not None:
            raise Unusable(reason)
        if self.is_up:
            return
        self.down()
        try:
            self.folder.mkdir(parents=True, mode=0o755)
            self._write_files(accounting)
            self._start_munge()
            if accounting:
                self._start_accounting()
            self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
            for node in self.nodes:
                self.start_node(node)
            self._wait("the nodes", lambda: self.is_up)
        except BaseException:
            self.down()
            raise

    def _write_files(self, accounting: bool) -> None:
        ports = iter(_free_ports(NODES + 2))
        self._write("token", secrets.token_hex(8))
        self._write("munge.key", secrets.token_hex(512), mode=0o400)
        for name in ("state", "log", "pid"):
            (self.folder / name).mkdir()
        names = " ".join(self.nodes)
        self._write(self._hosts, f"127.0.0.1 localhost {socket.gethostname()} {names}\n")
        dbd_port, control_port = next(ports), next(ports)
        text = _SLURM_CONF.format(
            host=socket.gethostname(),
            folder=self.folder,
            port=control_port,
            max_array_size=MAX_ARRAY_SIZE,
            min_job_age_s=5 if accounting else 600,  # the database remembers
        )
        if accounting:
            text += _ACCOUNTING_CONF.format(port=dbd_port, folder=self.folder)
            dbd = _DBD_CONF.format(host=socket.gethostname(), folder=self.folder, port=dbd_port)
            self._write("slurmdbd.conf", dbd, mode=0o600)
        for node in self.nodes:
            (self.folder / "state" / node).mkdir()
            text += (
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={next(ports)} CPUs={CPUS_PER_NODE} "
                "RealMemory=4000 State=UNKNOWN\n"
            )
        self._write("slurm.conf", text)

    def _start_munge(self) -> None:
        folder = self.folder
        self._start(
            "munged",
            [
                "munged",
                "--foreground",
                "--force",
                f"--key-file={folder}/munge.key",
                f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/pid/munge",
                f"--log-file={folder}/log/munged_own",
                f"--seed-file={folder}/munge.seed",
            ],
        )
        self._wait("munged", (folder / "munge.socket").exists)

    def _start_accounting(self) -> None:
        data, mysql = self.folder / "mysql", f"{self.folder}/mysql.socket"
        made = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db"]
        subprocess.run(
            [*made, "--auth-root-authentication-method=socket"], capture_output=True, check=True, timeout=120
        )
        options = [f"--datadir={data}", f"--socket={mysql}", "--skip-networking", "--user=root"]
        options += [f"--pid-file={self.folder}/pid/mysql", "--innodb-buffer-pool-size=64M"]
        self._start("mariadbd", ["mariadbd", "--no-defaults", *options])
        ready = ["mariadb-admin", "--no-defaults", f"--socket={mysql}", "ping"]
        self._wait("mariadbd", lambda: subprocess.run(ready, capture_output=True).returncode == 0)
        self._start("slurmdbd", ["slurmdbd", "-D"], SLURM_CONF=str(self.conf), MYSQL_UNIX_PORT=mysql)
        register = ("sacctmgr", "-i", "add", "cluster", "optimus_cc_tests")
        self._wait("slurmdbd", lambda: self.run(*register, check=False).returncode == 0)

    def start_node(self, node: str) -> None:
        """Start a node; also one that was killed."""
        inside = (
            f"hostname {node} && mount --bind {self.folder}/{self._hosts} /etc/hosts && "
            f"exec slurmd -D -f {self.conf} -N {node}"
        )
        command = ["unshare", "-m", "-u", "--propagation", "private", "bash", "-c", inside]
        self._start(node, command)

    def kill_node(self, node: str) -> None:
        """What a power cut does: every process of the node dies at once."""
        namespace = self.folder / "pid" / f"{node}.uts"
        self._end(lambda: _of_namespace(namespace.read_text()), signal.SIGKILL)

    # Down.

    def down(self) -> None:
        """End every process of it and remove its folder; nothing happens if there is none."""
        if not self.folder.exists():
            return
        if not (self.folder / "token").exists() and any(self.folder.iterdir()):
            raise Unusable(f"{self.folder} holds something else than a cluster of these tests")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.run("scancel", "--user=root", "--state=RUNNING", "--quiet", check=False)
        if (self.folder / "token").exists():
            self._end(self._processes, signal.SIGTERM, wait_s=3.0)
            self._end(self._processes, signal.SIGKILL)
        shutil.rmtree(self.folder)

    def _processes(self) -> list[int]:
        """What runs in the nodes, which share a mount that nothing else has, and the daemons."""
        daemons = {int(path.read_text()) for path in (self.folder / "pid").glob("*.daemon")}
        found = [pid for pid in daemons if str(self.folder) in _read(f"/proc/{pid}/environ")]
        return [*found, *(pid for pid in _pids() if self._hosts in _read(f"/proc/{pid}/mountinfo"))]

    def _end(self, processes: Callable[[], Sequence[int]], number: signal.Signals, wait_s: float = _WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while found := [pid for pid in processes() if not _is_zombie(pid)]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    # Parts.

    @property
    def _hosts(self) -> str:
        """The name of the nodes' /etc/hosts, which tells their processes from all others."""
        return f"hosts_{(self.folder / 'token').read_text()}"

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.folder / name
        path.touch(mode=mode)
        path.write_text(text)

    def _start(self, name: str, command: Sequence[str], **more: str) -> None:
        """Start a daemon in the background that outlives this process."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        env |= {"PATH": _PATH, "OPTIMUS_CC_TEST_CLUSTER": str(self.folder), **more}
        with (self.folder / "log" / name).open("ab") as log:
            popen = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        (self.folder / "pid" / f"{name}.daemon").write_text(str(popen.pid))
        if name not in self.nodes:
            return
        mine = os.readlink("/proc/self/ns/uts")
        self._wait(f"the node {name}", lambda: _namespace(popen.pid) not in ("", mine))
        (self.folder / "pid" / f"{name}.uts").write_text(_namespace(popen.pid))

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not ready():
            if time.monotonic() > deadline:
                raise Unusable(f"{what} did not come up in {_WAIT_S:.0f} s:\n{self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        lines = []
        for log in sorted((self.folder / "log").iterdir()):
            lines += [f"  {log.name}: {line}" for line in log.read_text(errors="replace").splitlines()[-3:]]
        return "\n".join(lines)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


def _of_namespace(namespace: str) -> list[int]:
    if namespace == os.readlink("/proc/self/ns/uts"):
        return []
    return [pid for pid in _pids() if _namespace(pid) == namespace]


def _is_zombie(pid: int) -> bool:
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["Z"], ["X"], [])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


_SLURM_CONF = """\
ClusterName=optimus_cc_tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/state/%n
SlurmctldPidFile={folder}/pid/slurmctld
SlurmdPidFile={folder}/pid/slurmd.%n
SlurmctldLogFile={folder}/log/slurmctld_own
SlurmdLogFile={folder}/log/%n_own
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=15
SlurmctldTimeout=15
InactiveLimit=0
KillWait=5
OverTimeLimit=0
ReturnToService=2
JobRequeue=1
MinJobAge={min_job_age_s}
MaxArraySize={max_array_size}
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE MaxTime=60 DefaultTime=10
PartitionName=cancelling Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0 MaxTime=60 DefaultTime=10
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 DefaultTime=10
"""

_ACCOUNTING_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""

_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={folder}/log/slurmdbd_own
PidFile={folder}/pid/slurmdbd
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description="A SLURM cluster for tests.")
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--accounting", action="store_true", help="with a database of jobs, for sacct")
    options = parser.parse_args(arguments)
    cluster = Cluster(options.folder.absolute())
    try:
        if options.command == "up":
            cluster.up(options.accounting)
            print(f"{NODES} nodes are up. For SLURM's commands and launcher=slurm:\n")
            print(f"  export SLURM_CONF={cluster.conf}\n")
        else:
            cluster.down()
            print("the cluster is down")
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
