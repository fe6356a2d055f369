"""Jobs on a folder of files: what each is called, its commands, and what they do to the files."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lehr.core.task import Split
from lehr.domains.terminal.files.phrases import PHRASES

Files = dict[str, str]

WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("apple", "river", "stone", "green", "seven", "music", "paper", "cloud", "horse", "table", "salt"),
    "validation": ("bread", "night", "piano", "tiger", "north", "glass", "candle", "silver", "lamp"),
    "heldout": (
        "lemon",
        "ocean",
        "brick",
        "purple",
        "eight",
        "dance",
        "metal",
        "storm",
        "sheep",
        "chair",
        "sugar",
    ),
}
STEMS: dict[Split, tuple[str, ...]] = {
    "train": ("a", "b", "list", "notes", "data", "log", "todo", "names"),
    "validation": ("c", "items", "plan", "index"),
    "heldout": ("x", "y", "report", "info", "draft", "table"),
}
FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("docs", "old", "backup", "src"),
    "validation": ("new", "files"),
    "heldout": ("archive", "tmp", "store"),
}


@dataclass
class Scene:
    """The files at the start and at some moment, and names that are still free. Jobs change ``files`` as
    their commands would.
    """

    rng: random.Random
    split: Split
    start: Files = field(default_factory=dict[str, str])
    files: Files = field(default_factory=dict[str, str])
    taken: set[str] = field(default_factory=set[str])

    def name(self, extension: str = "txt") -> str:
        """Return a file name that nothing has yet."""
        free = [s for s in STEMS[self.split] if f"{s}.{extension}" not in self.taken]
        name = f"{self.rng.choice(free)}.{extension}"
        self.taken.add(name)
        return name

    def word(self) -> str:
        """Return a word of the split."""
        return self.rng.choice(WORDS[self.split])

    def add(self, extension: str = "txt", lines: int = 3) -> str:
        """Place a file of ``lines`` lines of one word each, and return its name."""
        return self.place(self.name(extension), self.rng.sample(WORDS[self.split], lines))

    def place(self, name: str, rows: list[str]) -> str:
        """Let a file be there from the start, and return its name."""
        self.start[name] = self.files[name] = "".join(f"{row}\n" for row in rows)
        return name


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was drawn: its sentence (without the full stop) and the turns that do it."""

    text: str
    turns: tuple[str, ...]


def _job(scene: Scene, name: str, *turns: str, **names: object) -> Job:
    """Word the job in one of the split's phrases, and fill names into its turns."""
    said = scene.rng.choice(PHRASES[name][scene.split])
    return Job(said.format(**names), tuple(turn.format(**names) for turn in turns))


def create(scene: Scene) -> Job:
    """Write words into a new file."""
    name, text = scene.name(), f"{scene.word()} {scene.word()}"
    scene.files[name] = text + "\n"
    return _job(scene, "create", 'echo "{t}" > {n}', n=name, t=text)


def append(scene: Scene) -> Job:
    """Add a line at the end of a file."""
    name, word = scene.add(), scene.word()
    scene.files[name] += word + "\n"
    return _job(scene, "append", 'echo "{w}" >> {n}', n=name, w=word)


def delete(scene: Scene) -> Job:
    """Remove a file."""
    name = scene.add()
    del scene.files[name]
    return _job(scene, "delete", "rm {n}", n=name)


def rename(scene: Scene) -> Job:
    """Give a file another name."""
    old = scene.add()
    new = scene.name()
    scene.files[new] = scene.files.pop(old)
    return _job(scene, "rename", "mv {o} {n}", o=old, n=new)


def copy(scene: Scene) -> Job:
    """Copy a file."""
    old = scene.add()
    new = scene.name()
    scene.files[new] = scene.files[old]
    return _job(scene, "copy", "cp {o} {n}", o=old, n=new)


def move(scene: Scene) -> Job:
    """Move a file into a new folder."""
    name, folder = scene.add(), scene.rng.choice(FOLDERS[scene.split])
    scene.files[f"{folder}/{name}"] = scene.files.pop(name)
    return _job(scene, "move", "mkdir -p {f}\nmv {n} {f}/", n=name, f=folder)


def _derive(
    scene: Scene,
    name: str,
    command: str,
    result: Callable[[list[str]], list[str]],
    source: str | None = None,
    **names: object,
) -> Job:
    """Make a job that reads ``{a}`` (a new file unless given) and writes what it yields to ``{b}``."""
    source = source or scene.add(lines=scene.rng.randint(4, 5))
    target = scene.name()
    scene.files[target] = "".join(f"{row}\n" for row in result(scene.files[source].splitlines()))
    return _job(scene, name, command, a=source, b=target, **names)


def count(scene: Scene) -> Job:
    """Count lines."""
    return _derive(scene, "count", "wc -l < {a} > {b}", lambda rows: [str(len(rows))])


def sort(scene: Scene) -> Job:
    """Sort lines."""
    return _derive(scene, "sort", "sort {a} > {b}", sorted)


def head(scene: Scene) -> Job:
    """Take the first lines."""
    k = scene.rng.randint(2, 3)
    return _derive(scene, "head", "head -n {k} {a} > {b}", lambda rows: rows[:k], k=k)


def extract(scene: Scene) -> Job:
    """Keep the lines with a word."""
    rows = scene.rng.sample(WORDS[scene.split], 4)
    word = scene.rng.choice(rows)
    source = scene.place(scene.name(), [*rows, f"{word} {scene.word()}"])
    return _derive(
        scene, "extract", "grep {w} {a} > {b}", lambda rows: [r for r in rows if word in r], source, w=word
    )


def replace(scene: Scene) -> Job:
    """Replace a word by another."""
    name = scene.add(lines=4)
    old, new = scene.rng.choice(scene.files[name].splitlines()), scene.word()
    while new == old:
        new = scene.word()
    scene.files[name] = scene.files[name].replace(old, new)
    return _job(scene, "replace", "sed -i 's/{o}/{w}/g' {n}", o=old, w=new, n=name)


def _hidden(scene: Scene) -> tuple[str, str]:
    """Place three files of one word each; return a word and the file that holds it."""
    words = scene.rng.sample(WORDS[scene.split], 3)
    names = [scene.place(scene.name(), [word]) for word in words]
    return scene.rng.choice(list(zip(words, names, strict=True)))


def find_and_delete(scene: Scene) -> Job:
    """Find the file with a word, then delete it."""
    word, target = _hidden(scene)
    del scene.files[target]
    return _job(scene, "find_and_delete", "grep -l {w} *", "rm {o}", w=word, o=target)


def find_and_rename(scene: Scene) -> Job:
    """Find the file with a word, then rename it."""
    word, target = _hidden(scene)
    new = scene.name("md")
    scene.files[new] = scene.files.pop(target)
    return _job(scene, "find_and_rename", "grep -l {w} *", "mv {o} {n}", w=word, o=target, n=new)


def find_and_append(scene: Scene) -> Job:
    """Find the file with a word, then add a line to it."""
    word, target = _hidden(scene)
    line = scene.word()
    scene.files[target] += f"{line}\n"
    return _job(scene, "find_and_append", "grep -l {w} *", 'echo "{l}" >> {o}', w=word, o=target, l=line)


SINGLE: tuple[Callable[[Scene], Job], ...] = (
    create, append, delete, rename, copy, move, count, sort, head, extract, replace,
)  # fmt: skip
LOOKING: tuple[Callable[[Scene], Job], ...] = (find_and_delete, find_and_rename, find_and_append)
