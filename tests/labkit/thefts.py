"""Ways to reach what is not a rank's own, past Python's audit hook. Each is a source; what it leaves in `got` is loot.

`here` holds what the test has laid out: `file` and `folder` of another learner with TOKEN in it, `parent` (the process
that waits for the answers), `job` (the folder that holds the ranks' folders), `host` and `abstract`, two UNIX sockets
that somebody listens on, `root` of the checkout, `check`, a file in it, `library`, a file of an installed package, and
`number`, of calls.
"""

from __future__ import annotations

TOKEN = "the-secret-of-another-learner"

READS = {
    "a notebook of another": "got = open(here['file']).read()",
    "its folder": "got = os.listdir(here['folder'])",
    "a link to it": "os.symlink(here['file'], 'link')\ngot = open('link').read()",
    "a link to a folder above": "os.symlink('/' + '../' * 9, 'up')\ngot = open('up' + here['file']).read()",
    "a second name for it": "os.link(here['file'], 'name')\ngot = open('name').read()",
    "it, renamed": "os.rename(here['file'], 'mine')\ngot = open('mine').read()",
    "it, from above": "for _ in range(40): os.chdir('..')\ngot = open(here['file'][1:]).read()",
    "it, by the system's open": "fd = libc.open(here['file'].encode(), 0)\ngot = fd >= 0 and os.read(fd, 99)",
    "it, by a handle": "got = libc.syscall(*here['number']['open_by_handle_at'], -100, b'', 0) >= 0",
    "it, by its inode": "got = os.open(f'/.vol/{os.stat(here[\"folder\"]).st_dev}', 0)",
    "history": "git = here['root'] + '/.git'\ngot = os.path.isdir(git) and os.listdir(git) or open(git).read()",
    "solutions": "got = os.listdir(here['root'] + '/solutions')",
    "checks": "got = os.listdir(here['root'] + '/course/01_process_groups')",
    "checks beside a lab's tools": "got = open(here['root'] + here['check']).read()",
    "tests": "got = os.listdir(here['root'] + '/tests')",
    "checks, by import": "import importlib\ngot = importlib.import_module('course.01_process_groups').LAB",
    "checks, by resources": "import importlib.resources as r\ngot = list(r.files('course').glob('*/checks/*'))",
    "checks, by linecache": "import linecache\ngot = linecache.getlines(here['root'] + here['check'])",
    "checks, by inspect": "import inspect, tests.labkit.mini_course as c\ngot = inspect.getsource(c)",
    "folders of other ranks": "got = os.listdir(here['job'])",
    "the job of rank 1": "got = open(here['job'] + '/job.1').read()",
    "temporary files": "got = [name for name in os.listdir('/tmp') if not here['root'].startswith(f'/tmp/{name}')]",
    "shared memory": "got = os.listdir('/dev/shm')",
    "homes": "got = os.listdir('/root') + os.listdir('/home')",
    "passwords": "got = open('/etc/passwd').read()",
    "command lines": (
        "got = ''\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: got += open(f'/proc/{pid}/cmdline').read()\n"
        "    except OSError: pass\n"
    ),
    "command line of the grader": "got = open(f'/proc/{here[\"parent\"]}/cmdline').read()",
    "environment of the nursery": "got = open(f'/proc/{os.getppid()}/environ').read()",
    "memory of the nursery": "got = open(f'/proc/{os.getppid()}/mem', 'rb')",
    "root of another": "got = open(f'/proc/{here[\"parent\"]}/root' + here['file']).read()",
    "own root again": "got = open('/proc/self/root' + here['file']).read()",
    "descriptors of the nursery": "got = os.listdir(f'/proc/{os.getppid()}/fd')",
    "mounts": "got = open('/proc/self/mountinfo').read()",
    "inherited descriptors": (
        "got = b''\n"
        "for fd in range(3, 4096):\n"
        "    try: os.set_blocking(fd, False); got += os.pread(fd, 1 << 20, 0)\n"
        "    except OSError: pass\n"
        "    try: got += os.read(fd, 1 << 20)\n"
        "    except OSError: pass\n"
    ),
    "objects of others": (
        "import gc\n"
        "word = ''.join(reversed('srehto-fo-stupni'))\n"
        "found = [r for o in gc.get_objects() for r in gc.get_referents(o) if isinstance(r, (str, bytes))]\n"
        "got = [r for r in found if word in str(r) and len(r) > len(word)]\n"
    ),
    "own memory": "got = open('/proc/self/mem', 'rb')",
}

REACHES = {
    "host socket": "s = socket.socket(socket.AF_UNIX)\ns.connect(here['host'])\ngot = s",
    "abstract socket": "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0' + here['abstract'])\ngot = s",
    "loopback": "got = socket.socket()",
    "raw packets": "got = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "kernel's messages": "got = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "pairs of sockets": "got = socket.socketpair()",
    "processes": "pid = libc.fork()\nif pid == 0: os._exit(0)\ngot = pid > 0",
    "processes, by clone": "got = libc.syscall(*here['number']['clone'], 17, 0, 0, 0, 0) >= 0",
    "processes, by clone3": "got = libc.syscall(435, bytes(64) , 64) >= 0",
    "programs": (
        "libc.execv(b'/bin/true', (ctypes.c_char_p * 2)(b'true', None))\ngot = ctypes.get_errno() not in (1, 13)"
    ),
    "programs, preloaded": (
        "os.environ['LD_PRELOAD'] = 'x.so'\n"
        "import sys\nlibc.execve(sys.executable.encode(), None, None)\ngot = ctypes.get_errno() not in (1, 2, 13)"
    ),
    "signals": "got = libc.kill(os.getppid(), 0) == 0",
    "signals to all": "got = libc.kill(-1, 0) == 0",
    "signals to the group of another": "got = libc.killpg(os.getpgid(here['parent']), 0) == 0",
    "signals, queued": "got = libc.sigqueue(os.getppid(), 0, 0) == 0",
    "signals, by descriptor": "got = os.pidfd_open(here['parent'])",
    "another's steps": "got = libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "another's memory": (
        "class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "buffer = ctypes.create_string_buffer(8)\n"
        "mine, theirs = V(ctypes.addressof(buffer), 8), V(id(None), 8)\n"
        "got = libc.process_vm_readv(os.getppid(), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0"
    ),
    "namespaces": "got = libc.unshare(0x20000) == 0 or libc.unshare(0x10000000) == 0",
    "mounts": "got = libc.mount(b'none', b'/', b'tmpfs', 0, None) == 0 or libc.umount2(b'/dev/null', 2) == 0",
    "another root": "got = libc.chroot(b'.') == 0",
    "another user": "got = any(libc.setresuid(u, u, u) == 0 for u in (0, 1, 65534))",
    "life after the grader": "got = libc.prctl(1, 0, 0, 0, 0) == 0",
    "a session": "got = libc.setsid() >= 0 or libc.setpgid(0, 0) == 0",
    "more memory": "import resource\ngot = resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) is None",
    "limits of others": "import resource\ngot = resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "files in memory": "got = os.memfd_create('x')",
    "segments in memory": "got = libc.shmget(0, 1 << 20, 0o1600) >= 0",
    "rings of calls": "got = libc.syscall(425, 8, bytes(120)) >= 0",
    "keys": "got = libc.syscall(*here['number']['keyctl'], 0, -3, 0) >= 0",
    "clock": "import time\ngot = time.clock_settime(time.CLOCK_REALTIME, time.time()) is None",
    "modes": "got = os.chmod(here['library'], 0o644) is None",
    "modes of another's": "got = os.chmod(here['file'], 0o777) is None",
    "times": "got = os.utime(here['library']) is None",
    "attributes": "got = os.setxattr(here['library'], 'user.x', b'x') is None",
    "modes of a device": "got = libc.chmod(b'/dev/null', 0o666) == 0",
    "times of a device": "got = os.utime('/dev/zero') is None",
    "owners": "got = os.chown(here['library'], 0, 0) is None",
    "libraries": "got = open(here['library'], 'r+')",
    "files beside": "got = open(here['folder'] + '/new', 'w')",
    "files at the root": "got = open('/new', 'w')",
    "shared files": "got = open('/dev/shm/new', 'w')",
    "devices": "got = os.mknod('disk', 0o60600, os.makedev(254, 0)) is None and open('disk', 'rb')",
    "threads": (
        "import threading\n"
        "def sleep(): libc.sleep(5)\n"
        "threading.stack_size(1 << 16)\nn = 0\n"
        "try:\n    for n in range(2000): threading.Thread(target=sleep, daemon=True).start()\n"
        "except RuntimeError: pass\n"
        "got = n > 200"
    ),
    "disk, without names": (
        "total = 0\n"
        "try:\n"
        "    for i in range(400):\n"
        "        f = os.open(f'f{i}', os.O_RDWR | os.O_CREAT)\n        os.unlink(f'f{i}')\n"
        "        total += os.write(f, bytes(1 << 20))\n"
        "except OSError: pass\n"
        "got = total > here['disk']"
    ),
}
