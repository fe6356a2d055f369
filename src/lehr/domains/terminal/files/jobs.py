"""Single jobs on a folder of files: words, commands, and what they do to the files."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lehr.core.task import Split

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


def _say(scene: Scene, phrases: Mapping[Split, str], **names: object) -> str:
    return phrases[scene.split].format(**names)


def _phrases(train: str, validation: str, heldout: str) -> dict[Split, str]:
    return {"train": train, "validation": validation, "heldout": heldout}


def create(scene: Scene) -> Job:
    """Write words into a new file."""
    name, text = scene.name(), f"{scene.word()} {scene.word()}"
    scene.files[name] = text + "\n"
    said = _phrases(
        "create {n} containing {t}", "write {t} into a new file {n}", "create the file {n} with the text {t}"
    )
    return Job(_say(scene, said, n=name, t=text), (f'echo "{text}" > {name}',))


def append(scene: Scene) -> Job:
    """Add a line at the end of a file."""
    name, word = scene.add(), scene.word()
    scene.files[name] += word + "\n"
    said = _phrases(
        "append the line {w} to {n}", "put the line {w} at the end of {n}", "append {w} as a line to {n}"
    )
    return Job(_say(scene, said, n=name, w=word), (f'echo "{word}" >> {name}',))


def delete(scene: Scene) -> Job:
    """Remove a file."""
    name = scene.add()
    del scene.files[name]
    said = _phrases("delete {n}", "erase {n}", "delete the file {n}")
    return Job(_say(scene, said, n=name), (f"rm {name}",))


def rename(scene: Scene) -> Job:
    """Give a file another name."""
    old = scene.add()
    new = scene.name()
    scene.files[new] = scene.files.pop(old)
    said = _phrases("rename {o} to {n}", "give {o} the name {n}", "rename the file {o} as {n}")
    return Job(_say(scene, said, o=old, n=new), (f"mv {old} {new}",))


def copy(scene: Scene) -> Job:
    """Copy a file."""
    old = scene.add()
    new = scene.name()
    scene.files[new] = scene.files[old]
    said = _phrases("copy {o} to {n}", "duplicate {o} as {n}", "make a copy of {o} called {n}")
    return Job(_say(scene, said, o=old, n=new), (f"cp {old} {new}",))


def move(scene: Scene) -> Job:
    """Move a file into a new folder."""
    name, folder = scene.add(), scene.rng.choice(FOLDERS[scene.split])
    scene.files[f"{folder}/{name}"] = scene.files.pop(name)
    said = _phrases(
        "move {n} into a new folder {f}",
        "put {n} into the new folder {f}",
        "move {n} to a new folder called {f}",
    )
    return Job(_say(scene, said, n=name, f=folder), (f"mkdir -p {folder}\nmv {name} {folder}/",))


def _derive(
    scene: Scene,
    phrases: Mapping[Split, str],
    command: str,
    result: Callable[[list[str]], list[str]],
    **names: object,
) -> Job:
    """Make a job that reads ``{a}`` (a new file unless given) and writes what it yields to ``{b}``."""
    source = str(names.get("a") or scene.add(lines=scene.rng.randint(4, 5)))
    target = scene.name()
    names = {**names, "a": source, "b": target}
    scene.files[target] = "".join(f"{row}\n" for row in result(scene.files[source].splitlines()))
    return Job(_say(scene, phrases, **names), (command.format(**names),))


def count(scene: Scene) -> Job:
    """Count lines."""
    said = _phrases(
        "write the number of lines of {a} to {b}",
        "count the lines of {a} into {b}",
        "save the number of lines of {a} in {b}",
    )
    return _derive(scene, said, "wc -l < {a} > {b}", lambda rows: [str(len(rows))])


def sort(scene: Scene) -> Job:
    """Sort lines."""
    said = _phrases(
        "sort {a} into {b}", "put the sorted lines of {a} in {b}", "write the lines of {a}, sorted, to {b}"
    )
    return _derive(scene, said, "sort {a} > {b}", sorted)


def backwards(scene: Scene) -> Job:
    """Sort lines the other way round."""
    said = _phrases(
        "sort {a} in reverse into {b}",
        "put the reverse sorted lines of {a} in {b}",
        "write the lines of {a}, sorted in reverse, to {b}",
    )
    return _derive(scene, said, "sort -r {a} > {b}", lambda rows: sorted(rows, reverse=True))


def head(scene: Scene) -> Job:
    """Take the first lines."""
    k = scene.rng.randint(2, 3)
    said = _phrases(
        "write the first {k} lines of {a} to {b}",
        "put {k} top lines of {a} in {b}",
        "save the first {k} lines of {a} as {b}",
    )
    return _derive(scene, said, "head -n {k} {a} > {b}", lambda rows: rows[:k], k=k)


def tail(scene: Scene) -> Job:
    """Take the last lines."""
    k = scene.rng.randint(2, 3)
    said = _phrases(
        "write the last {k} lines of {a} to {b}",
        "put {k} end lines of {a} in {b}",
        "save the last {k} lines of {a} as {b}",
    )
    return _derive(scene, said, "tail -n {k} {a} > {b}", lambda rows: rows[-k:], k=k)


def upper(scene: Scene) -> Job:
    """Turn into upper case."""
    said = _phrases(
        "write {a} in upper case to {b}", "put {a} in {b}, all upper case", "save {a} in upper case as {b}"
    )
    return _derive(scene, said, "tr a-z A-Z < {a} > {b}", lambda rows: [row.upper() for row in rows])


def extract(scene: Scene) -> Job:
    """Keep the lines with a word."""
    rows = scene.rng.sample(WORDS[scene.split], 4)
    word = scene.rng.choice(rows)
    source = scene.place(scene.name(), [*rows, f"{word} {scene.word()}"])
    said = _phrases(
        "write the lines of {a} with {w} to {b}",
        "put lines with {w} from {a} in {b}",
        "save the lines of {a} with {w} as {b}",
    )
    return _derive(
        scene, said, "grep {w} {a} > {b}", lambda rows: [r for r in rows if word in r], a=source, w=word
    )


def column(scene: Scene) -> Job:
    """Take a column of a table."""
    rows = [f"{scene.word()},{scene.rng.randint(1, 99)},{scene.word()}" for _ in range(3)]
    source = scene.place(scene.name("csv"), rows)
    k = scene.rng.randint(1, 3)
    said = _phrases(
        "write column {k} of {a} to {b}",
        "put column number {k} of {a} in {b}",
        "save column {k} of the table {a} as {b}",
    )
    return _derive(
        scene, said, "cut -d, -f{k} {a} > {b}", lambda rows: [r.split(",")[k - 1] for r in rows], a=source, k=k
    )


def replace(scene: Scene) -> Job:
    """Replace a word by another."""
    name = scene.add(lines=4)
    old, new = scene.rng.choice(scene.files[name].splitlines()), scene.word()
    scene.files[name] = scene.files[name].replace(old, new)
    said = _phrases("replace {o} by {w} in {n}", "turn {o} into {w} in {n}", "replace every {o} by {w} in {n}")
    return Job(_say(scene, said, o=old, w=new, n=name), (f"sed -i 's/{old}/{new}/g' {name}",))


def drop_lines(scene: Scene) -> Job:
    """Delete the lines with a word."""
    name = scene.add(lines=4)
    word = scene.rng.choice(scene.files[name].splitlines())
    scene.files[name] = "".join(f"{r}\n" for r in scene.files[name].splitlines() if word not in r)
    said = _phrases(
        "delete the lines with {w} from {n}",
        "erase lines with {w} in {n}",
        "delete from {n} every line with {w}",
    )
    return Job(_say(scene, said, w=word, n=name), (f"sed -i '/{word}/d' {name}",))


def _hidden(scene: Scene) -> tuple[str, str]:
    """Place three files of one word each; return a word and the file that holds it."""
    words = scene.rng.sample(WORDS[scene.split], 3)
    names = [scene.place(scene.name(), [word]) for word in words]
    return scene.rng.choice(list(zip(words, names, strict=True)))


def find_and_delete(scene: Scene) -> Job:
    """Find the file with a word, then delete it."""
    word, target = _hidden(scene)
    del scene.files[target]
    said = _phrases(
        "delete the file that contains {w}",
        "erase whichever file has {w} in it",
        "find the file that contains {w} and delete it",
    )
    return Job(_say(scene, said, w=word), (f"grep -l {word} *", f"rm {target}"))


def find_and_rename(scene: Scene) -> Job:
    """Find the file with a word, then rename it."""
    word, target = _hidden(scene)
    new = scene.name("md")
    scene.files[new] = scene.files.pop(target)
    said = _phrases(
        "rename the file that contains {w} to {n}",
        "give the name {n} to whichever file has {w} in it",
        "find the file that contains {w} and rename it to {n}",
    )
    return Job(_say(scene, said, w=word, n=new), (f"grep -l {word} *", f"mv {target} {new}"))


def find_and_append(scene: Scene) -> Job:
    """Find the file with a word, then add a line to it."""
    word, target = _hidden(scene)
    line = scene.word()
    scene.files[target] += f"{line}\n"
    said = _phrases(
        "append the line {l} to the file that contains {w}",
        "put the line {l} at the end of whichever file has {w} in it",
        "find the file that contains {w} and append the line {l}",
    )
    return Job(_say(scene, said, w=word, l=line), (f"grep -l {word} *", f'echo "{line}" >> {target}'))


SINGLE: tuple[Callable[[Scene], Job], ...] = (
    create, append, delete, rename, copy, move, count, sort, backwards, head, tail, upper, extract, column,
    replace, drop_lines,
)  # fmt: skip
LOOKING: tuple[Callable[[Scene], Job], ...] = (find_and_delete, find_and_rename, find_and_append)
