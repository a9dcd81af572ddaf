"""Pieces of the headline run: each has a name, a time limit and an outcome; none ends the others."""
import contextlib
import os
import pathlib
import signal
import subprocess
import time


class Failure(Exception):
    """A piece found something wrong; the text says what."""


class Skipped(Exception):
    """A piece cannot run here, and need not: the text says why."""


class Piece:
    """Of a piece that runs: its commands share its time."""

    def __init__(self, log, seconds):
        self.log = log
        self.end = time.monotonic() + seconds

    def left(self):
        return self.end - time.monotonic()

    def command(self, words, environment=None, allowed=(0,)):
        """Runs a command; returns what it wrote to standard output.

        Everything it writes goes to the log of the piece. Fails where it ends with a status that is not
        `allowed`, or is not done when the piece's time is over: then it is killed with all its processes.
        """
        words = [str(word) for word in words]
        if self.left() <= 0:
            raise Failure("out of time")
        with open(self.log, "a", encoding="utf-8") as log:
            log.write("$ " + " ".join(words) + "\n")
            log.flush()
            with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                                  errors="replace", env={**os.environ, **(environment or {})},
                                  start_new_session=True) as process:
                try:
                    out, _ = process.communicate(timeout=self.left())
                except subprocess.TimeoutExpired as expired:
                    end(process)
                    out, _ = process.communicate()
                    log.write(out)
                    raise Failure(f"out of time in `{short(words)}`") from expired
            log.write(out)
        if process.returncode not in allowed:
            raise Failure(f"exit status {process.returncode} of `{short(words)}`: {last_line(self.log)}")
        return out


def descendants(pid):
    """The processes below one, itself included."""
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "PID (NAME) STATE PARENT …": a name may have blanks and brackets.
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def end(process, seconds=3):
    """Ends a process and all below it. Open MPI's ranks have process groups of their own, and those that are no
    programs of MPI would outlive their mpirun: it is asked first, then everything that it had started is killed."""
    there = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def short(words, length=60):
    text = " ".join(pathlib.PurePath(words[0]).name if i == 0 else word for i, word in enumerate(words))
    return text if len(text) <= length else text[:length] + "…"


def last_line(log):
    """The line of a log that tells most: the program's error, else the last one that names one, else the last one."""
    lines = [line.strip() for line in pathlib.Path(log).read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("$ ")]
    own = [line for line in lines if line.startswith("error:")]  # mpirun ends with "errorcode" in a line of its own
    errors = [line for line in lines if "rror" in line]
    return (own or errors or lines or ["no output"])[-1][:200]


class Pieces:
    """The pieces of a run, in the order in which they were done. `seconds`: for all of them together."""

    def __init__(self, folder, seconds, say=print):
        self.folder = pathlib.Path(folder)
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + seconds
        self.say = say
        self.done = []

    def left(self):
        return self.end - time.monotonic()

    def run(self, name, limit, work, needs=0):
        """Calls work(piece), which has `limit` seconds, or what is left of all; returns its result, None where it
        failed or was skipped. A string is what the piece has to say. A piece that `needs` more seconds than are left is
        not run; one that needs none is essential, and fails then."""
        begin = time.monotonic()
        seconds = min(limit, self.left())
        status, text, result = "ok", "", None
        log = self.logs / ("".join(c if c.isalnum() else "_" for c in name) + ".log")
        try:
            if needs > 0 and self.left() < needs:
                raise Skipped(f"{max(self.left(), 0):.0f} s were left, it needs about {needs:.0f}")
            if seconds <= 0:
                raise Failure("no time was left for it")
            log.touch()
            result = work(Piece(log, seconds))
            if isinstance(result, str):
                text = result
        except Skipped as skipped:
            status, text = "not run", str(skipped)
        except (Failure, OSError, ValueError, KeyError) as failure:
            status, text = "FAILED", str(failure) if isinstance(failure, Failure) else repr(failure)
        self.done.append({"piece": name, "status": status, "seconds": round(time.monotonic() - begin, 1), "text": text})
        self.say(f"{status:<8}{time.monotonic() - begin:6.1f} s  {name}{': ' + text if text else ''}")
        return result

    def seconds_of(self, kind):
        """Of the longest piece so far whose name begins so."""
        return max([piece["seconds"] for piece in self.done if piece["piece"].startswith(kind)], default=0)

    def failed(self):
        return [piece["piece"] for piece in self.done if piece["status"] == "FAILED"]
