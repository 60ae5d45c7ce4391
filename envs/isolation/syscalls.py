"""The numbers of the system calls that the seccomp filter judges, on each machine it knows."""

# Audit architecture of each machine, as the kernel passes it to a filter (linux/audit.h).
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# From the kernel's unistd.h of each machine; "-" where it has no such call.
_TABLE = """
name                x86_64  aarch64
pidfd_open             434      434
pidfd_getfd            438      438
pidfd_send_signal      424      424
io_uring_setup         425      425
io_uring_enter         426      426
io_uring_register      427      427
open_tree              428      428
move_mount             429      429
fsopen                 430      430
fsconfig               431      431
fsmount                432      432
fspick                 433      433
clone3                 435      435
mount_setattr          442      442
openat2                437      437
socket                  41      198
ptrace                 101      117
process_vm_readv       310      270
process_vm_writev      311      271
kcmp                   312      272
unshare                272       97
setns                  308      268
mount                  165       40
umount2                166       39
pivot_root             155       41
chroot                 161       51
bpf                    321      280
keyctl                 250      219
add_key                248      217
request_key            249      218
userfaultfd            323      282
perf_event_open        298      241
init_module            175      105
finit_module           313      273
delete_module          176      106
kexec_load             246      104
kexec_file_load        320      294
name_to_handle_at      303      264
open_by_handle_at      304      265
swapon                 167      224
swapoff                168      225
reboot                 169      142
acct                   163       89
quotactl               179       60
settimeofday           164      170
clock_settime          227      112
clock_adjtime          305      266
adjtimex               159      171
sethostname            170      161
setdomainname          171      162
syslog                 103      116
vhangup                153       58
fanotify_init          300      262
shmget                  29      194
shmat                   30      196
semget                  64      190
msgget                  68      186
mq_open                240      180
iopl                   172        -
ioperm                 173        -
modify_ldt             154        -
uselib                 134        -
ustat                  136        -
truncate                76       45
clone                   56      220
fork                    57        -
vfork                   58        -
execve                  59      221
execveat               322      281
kill                    62      129
tkill                  200      130
rt_sigqueueinfo        129      138
rt_tgsigqueueinfo      297      240
tgkill                 234      131
socketpair              53      199
sendto                  44      206
sendmsg                 46      211
sendmmsg               307      269
prlimit64              302      261
setpriority            141      140
sched_setparam         142      118
sched_setscheduler     144      119
sched_setaffinity      203      122
sched_setattr          314      274
ioprio_set             251       30
migrate_pages          256      238
move_pages             279      239
fcntl                   72       25
ioctl                   16       29
open                     2        -
openat                 257       56
creat                   85        -
shmctl                  31      195
semop                   65      193
semctl                  66      191
semtimedop             220      192
msgsnd                  69      189
msgrcv                  70      188
msgctl                  71      187
mq_unlink              241      181
"""


def _numbers() -> dict[str, dict[str, int]]:
    """Parse `_TABLE` into machine -> name of the system call -> its number on that machine.

    Calls that a machine does not have are left out.
    """
    header, *lines = _TABLE.strip().splitlines()
    machines = header.split()[1:]  # without the heading "name"
    numbers: dict[str, dict[str, int]] = {machine: {} for machine in machines}
    for line in lines:
        name, *columns = line.split()
        for machine, number in zip(machines, columns, strict=True):
            if number != "-":
                numbers[machine][name] = int(number)
    return numbers


NUMBERS = _numbers()  # machine -> name of the call -> its number
