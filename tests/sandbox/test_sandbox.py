"""The sandbox: what a program may do, what it may not do, and that tests are run as they should.

Every escape is really tried. The tests need bubblewrap and permission to use it; otherwise they are
skipped with the reason. test_cheats.py has programs that lie about their values.
"""

import json
import os
import socket
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
from sandbox_programs import FAKE_TESTS, FAKES, RIGHT

from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox import bubblewrap, local
from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits, SandboxError, same_output
from postgrad.sandbox.seccomp import seccomp_filter
from postgrad.verifiers.pool import VerifierPool

try:
    local.probe()
    MISSING = ""
except SandboxError as reason:
    MISSING = str(reason)
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")

QUICK = Limits(time_s=10.0, memory_mb=256)  # a generous clock: the machine may be busy


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return Sandbox(QUICK)


def lines(code: str) -> str:
    return textwrap.dedent(code)


def passed(results) -> list[int]:
    return [int(result.passed) for result in results]


# ---- running and testing


@needs_sandbox
def test_a_program_runs_with_its_input(box):
    outcome = box.run("import math\nprint(math.factorial(int(input())))", "5\n")
    assert (outcome.code, outcome.output, outcome.stopped) == (0, "120\n", "")
    assert outcome.seconds > 0
    outcome = box.run("import sys\nprint('x', file=sys.stderr)\nsys.exit(3)")
    assert (outcome.code, outcome.output, outcome.errors) == (3, "", "x\n")


@pytest.mark.slow
@needs_sandbox
def test_asserts_outputs_and_time_limits(box):
    """The numbers of Classmate's section 8.11."""
    add = "def add(a, b):\n    return a + b\n"
    results = box.test_asserts(
        add, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"]
    )
    assert passed(results) == [1, 1, 0] and results[2].seconds == -1.0 and results[0].seconds > 0
    pairs = [
        {"input": a, "output": b} for a, b in (("1", "2"), ("100", "101"), ("1", "2.0"), ("1", "3"))
    ]
    results = box.test_stdio("print(int(input()) + 1)", pairs)
    assert passed(results) == [1, 1, 1, 0] and results[3].reason == "wrong output"
    loop = "def f():\n    while True: pass\n"
    assert passed(box.test_asserts(loop, ["f()", "assert 1"], limits=Limits(time_s=1.0))) == [0, 1]


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name, box):
    program, tests = RIGHT[name]
    results = box.test_asserts(program, tests)
    assert passed(results) == [1] * len(tests), results


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import nowhere", "ModuleNotFoundError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended"),
        ("def g(): return 1", "NameError"),
        ("def f(): return 1 / 0", "ZeroDivisionError"),
        ("f = 3", "TypeError"),
        ("import os\ndef f(): os._exit(0)", "the program ended"),
        ("def f(): exit()", "SystemExit"),
        ("f = lambda: f()", "RecursionError"),
        ("\0", "Error"),
        ("x = '\ud800'", "Error"),
    ],
)
def test_wrong_programs_fail_with_their_reason(program, reason, box):
    (result,) = box.test_asserts(program, ["assert f() == 1"])
    assert not result.passed and reason in result.reason


# ---- cheats: none of these programs knows the answer


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("name", FAKES)
def test_no_program_passes_without_the_answer(name, box):
    """Two programs never reply, so that each test takes its full second: they get one test."""
    tests = FAKE_TESTS[:1] if name in ("patched channel", "alarm") else FAKE_TESTS
    results = box.test_asserts(FAKES[name], tests, limits=Limits(time_s=1.0, memory_mb=256))
    assert passed(results) == [0] * len(tests), [
        (t, r) for t, r in zip(tests, results, strict=True) if r.passed
    ]


@needs_sandbox
def test_the_same_tests_pass_with_the_answer(box):
    assert passed(box.test_asserts("import math\ndef f(x): return 41", FAKE_TESTS)) == [1] * len(
        FAKE_TESTS
    )


@needs_sandbox
def test_the_program_never_sees_the_expected_value(box):
    """The program searches its process for a number that only the tests have."""
    hunt = """
    import gc, sys, os
    def f(x):
        seen = []
        for o in gc.get_objects():
            try: seen.append(repr(o))
            except BaseException: pass
        text = "".join(seen)
        return 7316 * 1000 + 4205 if ("7316" + "4205") in text.replace("7316 * 1000", "") else 0
    """
    (result,) = box.test_asserts(lines(hunt), ["assert f(1) == 73164205"])
    assert not result.passed and "failed" in result.reason


@needs_sandbox
def test_the_test_runner_only_calls_functions_that_a_test_passed(box):
    """The program sends requests of its own while it serves one."""
    hostile = """
    import gc
    def f(g):
        channel = g.channel
        out = []
        requests = [("getattr", [g, "__globals__"]), ("eval", ["1"])]
        requests.append(("call", ["__import__", "os"]))
        for what, arguments in requests:
            try: out.append(str(channel.ask(what, *arguments)))
            except BaseException as error: out.append(type(error).__name__)
        return out, g(20)
    """
    (result,) = box.test_asserts(
        lines(hostile), ["got = f(lambda x: x + 1)\nassert got == (['ValueError'] * 3, 21), got"]
    )
    assert result.passed, result


@needs_sandbox
def test_a_test_whose_value_cannot_be_sent_is_unsupported(box):
    (result,) = box.test_asserts(
        "def f(x): return 1", ["import threading\nassert f(threading.Lock()) == 1"]
    )
    assert not result.passed and result.unsupported and "lock" in result.reason


# ---- escapes


@needs_sandbox
def test_no_network(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.2)
        program = f"""
        import socket
        for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            try:
                s = socket.socket(kind)
                s.settimeout(1)
                s.connect(("127.0.0.1", {port}))
                print("connected")
            except OSError as error:
                print("refused")
        try: print(socket.getaddrinfo("example.org", 80))
        except OSError: print("refused")
        """
        assert box.run(lines(program)).output.split() == ["refused"] * 4
        with pytest.raises(TimeoutError):
            server.accept()


@needs_sandbox
def test_no_files_of_this_system(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("do not read")
    secret.chmod(0o666)
    places = [
        "/etc/passwd",
        "/etc/shadow",
        str(secret),
        __file__,
        str(Path.home() / ".bashrc"),
        "/proc/self/environ",
        "/proc/1/root",
    ]
    places += [
        "/sys",
        "/dev/mem",
        "/dev/shm",
        "/var",
        "/home",
        "/run",
        "/usr/bin/env",
        "/bin/sh",
        "/opt",
        str(Path.cwd()),
    ]
    if not Path(sys.base_prefix).is_relative_to(Path.home()):
        places.append(str(Path.home()))
    program = f"""
    import os
    for place in {places!r}:
        try: print(place, os.listdir(place) if os.path.isdir(place) else open(place).read(5))
        except OSError: pass
    for depth in range(1, 12):
        try: print(open("../" * depth + "etc/passwd").read(5))
        except OSError: pass
    """
    outcome = box.run(lines(program))
    assert outcome.code == 0 and outcome.output == "", outcome.output
    assert secret.read_text() == "do not read"


@needs_sandbox
def test_no_links_to_files_of_this_system(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("do not read")
    program = f"""
    import os
    for target in ({str(secret)!r}, "/etc/passwd", "/proc/1/root/etc/passwd"):
        os.symlink(target, "link")
        try: print(open("link").read())
        except OSError: print("refused")
        try:
            open("link", "w").write("overwritten")
            print("written")
        except OSError: print("refused")
        os.unlink("link")
        try:
            os.link(target, "link")
            print("linked")
        except OSError: print("refused")
    """
    assert set(box.run(lines(program)).output.split()) == {"refused"}
    assert secret.read_text() == "do not read"


@needs_sandbox
def test_only_a_private_tmp_can_be_written(box):
    program = """
    import os, sys
    places = ["/", "/inside", "/usr/lib", "/etc", "/dev", sys.executable]
    places.append(os.path.dirname(os.__file__))
    for place in places:
        for name in (place, os.path.join(place, "new")):
            try:
                with open(name, "w"): print("written", name)
            except OSError: pass
        try: os.chmod(place, 0o777); print("chmod", place)
        except OSError: pass
    print(sorted(os.listdir("/tmp")))
    open("mine", "w").write("x")
    """
    assert box.run(lines(program)).output.split() == ["[]"]
    assert box.run(lines(program)).output.split() == ["[]"], (
        "the next program has a /tmp of its own"
    )


@needs_sandbox
def test_empty_environment(box, monkeypatch):
    monkeypatch.setenv("POSTGRAD_SECRET", "hush")
    outcome = box.run("import os, sys\nprint(sorted(os.environ), sys.argv, os.getcwd())")
    assert "SECRET" not in outcome.output and "['program.py'] /tmp" in outcome.output
    names = set(json.loads(outcome.output.split("] [")[0].replace("'", '"') + "]"))
    assert names <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "PYTHONHASHSEED"}


@pytest.mark.slow
@needs_sandbox
def test_no_child_processes(box):
    """Neither by fork, subprocess, system, multiprocessing or posix_spawn, nor by a fork bomb."""
    program = """
    import os, subprocess, multiprocessing, sys
    for make in (
        os.fork,
        lambda: subprocess.run([sys.executable, "-c", "1"]),
        lambda: os.system("true") and 1 / 0,
        lambda: multiprocessing.Process(target=print).start(),
        lambda: os.posix_spawn(sys.executable, ["x"], {}),
    ):
        try:
            make()
            print("made")
        except (OSError, ZeroDivisionError): print("refused")
    """
    assert box.run(lines(program)).output.split() == ["refused"] * 5
    bomb = box.run(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        limits=Limits(time_s=1.0),
    )
    assert bomb.stopped == "time"


@needs_sandbox
def test_threads_and_open_files_are_limited(box):
    program = """
    import threading, time
    threading.stack_size(256 << 10)  # aarch64 refuses stacks under 128 KiB
    n = 0
    try:
        while n < 5000:
            threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
            n += 1
    except RuntimeError: pass
    files = []
    try:
        while len(files) < 1000: files.append(open("f", "w"))
    except OSError: pass
    print(n, len(files), flush=True)
    import os
    os._exit(0)
    """
    threads, files = map(int, box.run(lines(program)).output.split())
    assert files < 64
    # The kernel does not count threads of root in a user namespace; memory limits them there.
    assert threads <= QUICK.threads or (os.geteuid() == 0 and not box.level.own_user)


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(1 << 31)",
        "x = 'a' * (1 << 31)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nmmap.mmap(-1, 1 << 31)",
    ],
)
def test_memory_is_limited(program, box):
    outcome = box.run(program, limits=Limits(time_s=20.0, memory_mb=128))
    assert outcome.code != 0 and not outcome.output
    assert "MemoryError" in outcome.errors or "Cannot allocate" in outcome.errors


@needs_sandbox
def test_memory_outside_the_process_is_refused(box):
    program = """
    import os, ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    for make in (
        lambda: os.memfd_create("x"),
        lambda: libc.shmget(0, 1 << 20, 0o1600) >= 0 or 1 / 0,
    ):
        try: print("made", make())
        except (OSError, ZeroDivisionError): print("refused")
    """
    outcome = box.run(lines(program))
    assert outcome.output.split() == ["refused"] * 2, outcome


@needs_sandbox
def test_disk_is_limited(box):
    program = """
    import os
    try: open("large", "wb").write(bytes(200 << 20))
    except (OSError, MemoryError) as error: print("refused")
    written = 0
    try:
        for n in range(100):
            with open(str(n), "wb") as file:
                written += file.write(bytes(4 << 20))
    except OSError: pass
    print(written >> 20)
    """
    outcome = box.run(lines(program), limits=Limits(time_s=20.0, disk_mb=32, file_mb=8))
    assert outcome.output.split()[0] == "refused" and int(outcome.output.split()[1]) <= 32


@pytest.mark.slow
@needs_sandbox
def test_output_and_time_are_limited(box):
    limits = Limits(time_s=20.0, output_kb=64)
    outcome = box.run("while True: print('x' * 1000)", limits=limits)
    assert outcome.stopped == "output" and len(outcome.output) < 1 << 18
    for program in (
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import signal\nsignal.pause()",
        "input()\nwhile True: pass",
    ):
        outcome = box.run(program, "x\n", limits=Limits(time_s=0.5))
        assert outcome.stopped == "time"
    hidden = """
    import os, signal
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except OSError: pass
    os.close(1)
    os.close(2)
    while True: pass
    """
    assert box.run(lines(hidden), limits=Limits(time_s=0.5)).stopped == "time"


@needs_sandbox
def test_no_access_to_other_processes_and_the_kernel(box):
    program = """
    import os, ctypes
    print(os.getppid(), os.getpid() < 10, os.path.exists("/proc"), os.path.exists("/sys"))
    libc = ctypes.CDLL(None, use_errno=True)
    calls = {
        "unshare": lambda: libc.unshare(0x10000000),
        "mount": lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
        "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
        "chroot": lambda: libc.chroot(b"/tmp"),
        "setuid": lambda: libc.setuid(0) if os.getuid() else -1,
        "reboot": lambda: libc.reboot(0),
        "setns": lambda: libc.setns(0, 0),
    }
    print([name for name, call in calls.items() if call() != -1])
    for pid in range(1, 50):
        if pid != os.getpid():
            try: os.kill(pid, 9)
            except OSError: pass
    print("alive")
    """
    output = box.run(lines(program)).output.splitlines()
    assert output[0].endswith("True False False") and output[1:] == ["[]", "alive"]


@needs_sandbox
def test_input_and_source_are_read_only(box):
    """They are unnamed files of this process; a program can neither change nor enlarge them."""
    program = """
    import os
    for fd in range(0, 64):
        if fd in (1, 2): continue
        try:
            os.write(fd, b"x")
            print("written", fd)
        except OSError: pass
        try:
            os.ftruncate(fd, 1 << 20)
            print("grown", fd)
        except OSError: pass
    """
    assert box.run(lines(program), "input").output == ""


@pytest.mark.slow
@needs_sandbox
def test_no_processes_and_files_are_left(box, children):
    before, files, temp = (
        set(children()),
        len([*Path("/proc/self/fd").iterdir()]),
        set(Path(tempfile.gettempdir()).iterdir()),
    )
    for program in (
        "print(1)",
        "while True: pass",
        "import os; os._exit(3)",
        "x = bytearray(1 << 31)",
        "\0",
    ):
        box.run(program, limits=Limits(time_s=0.5, memory_mb=128))
        box.test_asserts(program, ["assert f(1) == 2"], limits=Limits(time_s=0.5, memory_mb=128))
    assert set(children()) == before and len([*Path("/proc/self/fd").iterdir()]) == files
    left = [file for file in Path(tempfile.gettempdir()).glob("tmp*") if file.name not in temp]
    assert not [file for file in left if _owner(file) > 1_900_000_000]


def _owner(file):
    """Return the owner of a file, or -1 if it is gone: other tests have files there too."""
    try:
        return file.stat().st_uid
    except FileNotFoundError:
        return -1


@needs_sandbox
def test_threads_may_share_a_sandbox(box):
    outputs: dict[int, str] = {}

    def work(n: int) -> None:
        outputs[n] = box.run(f"print({n} * 2)").output

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outputs == {n: f"{n * 2}\n" for n in range(6)}


# ---- refusing to work


def test_it_refuses_without_bubblewrap(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap.find_bubblewrap.cache_clear()
    local.probe.cache_clear()
    try:
        with pytest.raises(SandboxError, match="install bubblewrap"):
            Sandbox()
    finally:
        monkeypatch.undo()
        bubblewrap.find_bubblewrap.cache_clear()
        local.probe.cache_clear()


@needs_sandbox
@pytest.mark.parametrize(
    ("option", "failure"),
    [
        ("--unshare-net", ""),
        ("--remount-ro", "root folder can be written"),
        ("--clearenv", "environment is not empty"),
    ],
)
def test_the_probe_finds_a_missing_protection(option, failure, monkeypatch):
    """The network has a second protection, the call filter: only without both it is found."""
    all_args = bubblewrap.bwrap_args

    def without(level, limits):
        args = all_args(level, limits)
        start = args.index(option)
        del args[start : start + (2 if option == "--remount-ro" else 1)]
        if option == "--clearenv":
            args[1:1] = ["--setenv", "LEAK", "1"]
        return args

    level = local.probe()
    monkeypatch.setattr(bubblewrap, "bwrap_args", without)
    if option == "--unshare-net":
        assert local.failed_protections(level) == []
        monkeypatch.setattr(bubblewrap, "seccomp_filter", lambda machine=None: None)
        assert "the network can be reached" in local.failed_protections(level)
    elif option == "--remount-ro" and level.own_user:
        assert local.failed_protections(level) == []  # the root folder belongs to root
    else:
        assert any(failure in text for text in local.failed_protections(level))


@needs_sandbox
def test_a_failed_probe_is_a_refusal(monkeypatch):
    monkeypatch.setattr(local, "failed_protections", lambda level: ["memory is not limited"])
    local.probe.cache_clear()
    try:
        with pytest.raises(
            SandboxError, match=r"no safe sandbox on this machine \(memory is not limited\)"
        ):
            Sandbox()
    finally:
        local.probe.cache_clear()


def test_the_call_filter_exists_for_two_processors():
    assert (
        seccomp_filter("x86_64") and seccomp_filter("aarch64") and seccomp_filter("riscv64") is None
    )
    for machine in ("x86_64", "aarch64"):
        program = seccomp_filter(machine)
        assert program and len(program) % 8 == 0 and len(program) // 8 < 4096


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("2\n", "2", True),
        ("  2  \n\n", "2", True),
        ("2.0", "2", True),
        ("1 2.50\n3", "1 2.5\n3.0", True),
        ("1\n2", "1 2", False),
        ("2", "3", False),
        ("", "2", False),
        ("", "", True),
        ("a b", "a  b", True),
        ("a b", "a c", False),
        ("nan", "nan", True),
        ("1e400", "1e401", False),
        ("yes", "YES", False),
    ],
)
def test_same_output(output, expected, same):
    assert same_output(output, expected) is same


# ---- the verifier

ADD = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 5) == 5"])
FENCE = "Here it is:\n```python\n{}\n```\nDone."


@pytest.mark.slow
@needs_sandbox
def test_code_verifier():
    stdio = json.dumps([{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}])
    humaneval = {
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "f",
        "prompt": "import math\n\ndef f(x):\n    '''Square.'''\n",
    }
    mbpp = {"test_list": ["assert math.isclose(area(1), math.pi)"], "test_imports": ["import math"]}
    apps = json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"})
    right = FENCE.format("def add(a, b):\n    return a + b")
    wrong = FENCE.format("def add(a, b):\n    return a - b")
    partly_right = FENCE.format("def add(a, b):\n    return max(a + b, 1)")
    method = FENCE.format("class Solution:\n    def add(self, a, b): return a + b")
    endless = FENCE.format("while True: pass")
    continued = FENCE.format("    return x * x")
    defined = FENCE.format("def f(x):\n    return math.prod([x, x])")
    area = FENCE.format("def area(r):\n    return 3.141592653589793 * r * r")
    add_problem = Problem("a", (), ADD, "code")
    one_test = Problem("a", (), json.dumps(["assert add(1, 2) == 3"]), "code")
    stdio_problem = Problem("b", (), stdio, "code_stdio")
    humaneval_problem = Problem("c", (), "", "openai_humaneval", (), humaneval)
    mbpp_problem = Problem("d", (), "", "mbpp", (), mbpp)
    apps_problem = Problem("e", (), apps, "apps")
    # (response, problem, (value, share of tests passed, format))
    rows = [
        (right, add_problem, (1, 1, 1)),
        (wrong, add_problem, (0, 0, 1)),
        (partly_right, add_problem, (0, 2 / 3, 1)),
        ("```\nnot this\n```\n" + right, add_problem, (1, 1, 1)),
        ("```python\ndef add(a, b):\n    return a + b", add_problem, (1, 1, 0)),
        ("def add(a, b):\n    return a + b\n", add_problem, (1, 1, 0)),
        ("I do not know.", add_problem, (0, 0, 0)),
        ("", add_problem, (0, 0, 0)),
        (endless, one_test, (0, 0, 1)),
        (FENCE.format("print(int(input()) + 1)"), stdio_problem, (1, 1, 1)),
        (FENCE.format("print(2)"), stdio_problem, (0, 0.5, 1)),
        (continued, humaneval_problem, (1, 1, 1)),
        (defined, humaneval_problem, (1, 1, 1)),
        (area, mbpp_problem, (1, 1, 1)),
        (right, apps_problem, (1, 1, 1)),
        (method, apps_problem, (1, 1, 1)),
    ]
    with VerifierPool(
        workers=2, timeout_s=1
    ) as pool:  # the verifier has a limit of its own, well above this
        results = pool.verify(
            [(response, problem) for response, problem, _ in rows], ["code"] * len(rows)
        )
        (bad,) = pool.verify([(right, Problem("f", (), "42", "code"))], ["code"])
        (odd,) = pool.verify(
            [
                (
                    right,
                    Problem(
                        "g",
                        (),
                        json.dumps(["import threading\nassert add(threading.Lock(), 1)"]),
                        "code",
                    ),
                )
            ],
            ["code"],
        )
    for (response, _, (answer, share, form)), result in zip(rows, results, strict=True):
        assert isinstance(result, Score), (response, result)
        assert (result.value, result.parts["passed"], result.parts["format"]) == (
            answer,
            pytest.approx(share),
            form,
        ), response
    assert isinstance(bad, Failure) and bad.kind == "invalid"
    assert isinstance(odd, Failure) and odd.kind == "unsupported"


def test_code_without_a_sandbox_is_a_failure(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with VerifierPool(workers=1, timeout_s=20) as pool:
        (result,) = pool.verify(
            [(FENCE.format("def add(a, b):\n    return a + b"), Problem("a", (), ADD, "code"))],
            ["code"],
        )
    assert isinstance(result, Failure) and result.kind == "error" and "bubblewrap" in result.reason


HOSTILE_MATH = [
    "\\boxed{10^{10^{10}}}",
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{99999999!}",
    "\\boxed{" + "{" * 5_000 + "}" * 5_000 + "}",
    "\\boxed{" + "(" * 900 + ")" * 900 + "}",
    "\\boxed{" + "7" * 1_000_000 + "}",
    "7" * 1_000_000,
    "\\boxed{" * 20_000,
    "\\boxed{\\frac{1}{\\frac{1}{" * 50,
    "\\boxed{\\sqrt{" + "\\sqrt{" * 300 + "2" + "}" * 301 + "}",
    "\\boxed{__import__('os').system('true')}",
    "\ud800\x00\\boxed{\x00}",
]
HOSTILE_CODE = [
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import threading\nwhile True:\n    try: threading.Thread(target=input).start()\n"
    "    except RuntimeError: break",
]


@needs_sandbox
@pytest.mark.slow
def test_a_thousand_responses_with_hostile_ones(problem, children):
    """Every twentieth response is hostile; all others get the right score, and nothing is left."""
    before, files = set(children()), len([*Path("/proc/self/fd").iterdir()])
    tests = json.dumps(["assert add(1, 2) == 3"])
    items, names, expected = [], [], []
    for i in range(1000):
        if i % 200 == 100:
            response = FENCE.format(HOSTILE_CODE[i // 200 % len(HOSTILE_CODE)])
            items.append((response, problem(tests, "code")))
        elif i % 20 == 0:
            items.append((HOSTILE_MATH[i // 20 % len(HOSTILE_MATH)], problem("\\frac{x}{3}")))
        else:
            items.append((f"so \\boxed{{{i % 7}}}", problem(str(i % 5))))
        names.append("code" if i % 200 == 100 else "math")
        expected.append(0.0 if i % 20 == 0 else float(i % 7 == i % 5))
    with VerifierPool(workers=2, timeout_s=10) as pool:
        results = pool.verify(items, names)
        assert len(set(children()) - before) <= 2
    hurt = [r for i, r in enumerate(results) if i % 20 == 0]
    assert all(isinstance(r, Failure) or r.value == 0.0 for r in hurt)
    assert [r.value for i, r in enumerate(results) if i % 20 and isinstance(r, Score)] == [
        e for i, e in enumerate(expected) if i % 20
    ]
    assert set(children()) == before and len([*Path("/proc/self/fd").iterdir()]) == files
