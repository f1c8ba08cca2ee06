"""The configuration files of the private Slurm, and what its daemons find on disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_files"]

# cred_expire: a requeued job waits for the credentials to expire, two minutes by default.
# %n: directories of their own, because the nodes share one file system.
# linuxproc, task/none, cgroup/v1, config_overrides: nothing that asks for control groups, systemd
# or as many cores as are declared.
SLURM = """\
ClusterName=hpctrain
SlurmctldHost={head}({head_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
TmpFS={root}/scratch/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
MpiDefault=pmix
ReturnToService=2
RequeueExit=75
KillWait=5
SlurmdTimeout={slurmd_timeout_s}
MailProg=/bin/true
NodeName=DEFAULT CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1
NodeName=DEFAULT RealMemory=4000 Gres=gpu:{gpus}
{nodes}
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL DefaultTime=10 PriorityTier=10 PreemptMode=OFF
"""

NULL_DEVICE = os.makedev(1, 3)


def write_files(
    root: Path,
    *,
    head: tuple[str, str],
    nodes: Mapping[str, str],
    cpus: int,
    gpus: int,
    slurmd_timeout_s: int,
) -> None:
    """Fills an empty directory.

    Args:
        root: The directory, which all nodes see and everybody may enter.
        head: The host name and address of the controller.
        nodes: The host names and addresses of the compute nodes.
        cpus: The cores that each node claims to have.
        gpus: The GPUs that each node claims to have; Slurm only wants to see character devices.
        slurmd_timeout_s: How long a node may be silent before the controller calls it down.
    """
    for name in ("state", "log", "dev", "spool", "scratch", "jobs"):
        (root / name).mkdir()
    for host in nodes:
        (root / "spool" / host).mkdir()
        (root / "scratch" / host).mkdir()
        (root / "scratch" / host).chmod(0o1777)
    for index in range(gpus):
        os.mknod(root / "dev" / f"gpu{index}", 0o666 | 0o020000, NULL_DEVICE)
    key = root / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    text = SLURM.format(
        root=root,
        head=head[0],
        head_address=head[1],
        cpus=cpus,
        gpus=gpus,
        slurmd_timeout_s=slurmd_timeout_s,
        nodes="\n".join(f"NodeName={host} NodeAddr={ip}" for host, ip in nodes.items()),
    )
    (root / "slurm.conf").write_text(text, encoding="utf-8")
    devices = f"Name=gpu File={root}/dev/gpu[0-{gpus - 1}]\n" if gpus else ""
    (root / "gres.conf").write_text(devices, encoding="utf-8")
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
