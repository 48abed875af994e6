"""C++ and JavaScript in the same sandbox."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from roll_like.sandbox.box import Ended, Program, SandboxUnavailable
from roll_like.sandbox.oneshot import EveryLanguageBox
from roll_like.sandbox.types import Limits

MIB = 1 << 20
LIMITS = Limits(wall_seconds=20, cpu_seconds=2, memory_bytes=256 * MIB)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUM_CPP = '#include <cstdio>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }'
SUM_JS = "const [a, b] = require('fs').readFileSync('/dev/stdin', 'utf8').split(' ').map(Number); console.log(a + b)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[EveryLanguageBox]:
    box = EveryLanguageBox(workers=2)
    yield box
    await box.close()


def installed(language: str) -> bool:
    return shutil.which({"cpp": "g++", "javascript": "node"}[language]) is not None


async def run_or_refused(box: EveryLanguageBox, language: str, source: str, stdin: str = "", limits: Limits = LIMITS):
    """Return the report, or None where the language's program is missing and the refusal says so."""
    if installed(language):
        return await box.run(Program(source, language), stdin, limits)
    with pytest.raises(SandboxUnavailable, match="apt-get install"):
        await box.run(Program(source, language), stdin, limits)
    return None


@pytest.mark.parametrize(("language", "source"), [("cpp", SUM_CPP), ("javascript", SUM_JS)])
async def test_a_program_reads_and_prints(box, language: str, source: str):
    if report := await run_or_refused(box, language, source, "3 4"):
        assert (report.ended, report.stdout, report.exit_code) == (Ended.EXITED, b"7\n", 0), report


@pytest.mark.parametrize(
    ("language", "source", "ended", "code"),
    [
        ("cpp", "int main() { return 3; }", Ended.ERROR, 3),
        ("cpp", "#include <cstdlib>\nint main() { abort(); }", Ended.ERROR, -6),
        ("cpp", "int main() { int *nowhere = 0; *(volatile int *)nowhere = 1; }", Ended.ERROR, -11),
        ("cpp", "int main( {", Ended.COMPILE_ERROR, 1),
        ("cpp", '#include "/etc/passwd"\nint main() {}', Ended.COMPILE_ERROR, 1),
        ("cpp", "int main() { for (volatile int i = 0;; i++); }", Ended.TIMEOUT, None),
        ("javascript", "process.exit(3)", Ended.ERROR, 3),
        ("javascript", "let = [", Ended.ERROR, 1),
        ("javascript", "for (;;);", Ended.TIMEOUT, None),
    ],
)
async def test_how_a_program_ends(box, language: str, source: str, ended: Ended, code: int | None):
    if report := await run_or_refused(box, language, source):
        assert report.ended is ended, report
        assert code is None or report.exit_code == code
        assert b"root" not in report.stdout + report.stderr.encode()


@pytest.mark.parametrize(
    ("language", "source"),
    [
        (
            "cpp",
            "#include <vector>\nint main() { std::vector<std::vector<char>> v; for (;;) v.emplace_back(1 << 20, 1); }",
        ),
        ("javascript", "const held = []; for (;;) held.push(Buffer.alloc(1 << 20, 1))"),
    ],
)
async def test_memory_is_limited_by_what_is_touched(box, language: str, source: str):
    if report := await run_or_refused(box, language, source):
        assert report.ended is Ended.MEMORY, report
        assert 200 * MIB < report.peak_memory_bytes < 700 * MIB


async def test_javascript_reaches_no_network_and_no_file(box):
    source = """
const fs = require('fs'), net = require('net')
const seen = []
try { fs.readFileSync('/etc/passwd'); seen.push('passwd') } catch (error) { seen.push(error.code) }
seen.push(Object.keys(process.env).filter(name => !['PATH', 'HOME', 'TMPDIR'].includes(name)).join())
seen.push(process.getuid())
net.connect(22, '127.0.0.1').on('error', error => { seen.push(error.code); console.log(seen.join(' ')) })
"""
    if report := await run_or_refused(box, "javascript", source):
        assert report.stdout.decode().split() in (["ENOENT", "1000", "EPERM"], ["ENOENT", "1000", "EACCES"]), report


async def test_an_executable_is_compiled_once(box):
    if await run_or_refused(box, "cpp", SUM_CPP, "1 2"):
        before = dict(box._compiled)
        assert SUM_CPP in before
        report = await box.run(Program(SUM_CPP, "cpp"), "5 6", LIMITS)
        assert report.stdout == b"11\n"
        assert box._compiled[SUM_CPP] is before[SUM_CPP]


async def test_other_languages_are_refused(box):
    with pytest.raises(SandboxUnavailable, match="'cobol'; there are python, cpp, javascript"):
        await box.run(Program("", "cobol"), "", LIMITS)
    assert (await box.run(Program("print(1)"), "", LIMITS)).stdout == b"1\n"
