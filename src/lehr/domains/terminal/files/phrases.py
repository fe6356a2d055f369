"""How each job is worded. No two splits share a phrase.

``{n}``: a name, ``{o}``: the old name, ``{a}`` and ``{b}``: the file that is read and the one that is written,
``{w}``, ``{l}``, ``{t}``: a word, a line, a text, ``{f}``: a folder, ``{k}``: a number.
"""

from __future__ import annotations

from collections.abc import Mapping

from lehr.core.task import Split


def _phrases(
    train: tuple[str, ...], validation: str, heldout: tuple[str, ...]
) -> Mapping[Split, tuple[str, ...]]:
    return {"train": train, "validation": (validation,), "heldout": heldout}


PHRASES: Mapping[str, Mapping[Split, tuple[str, ...]]] = {
    "create": _phrases(
        (
            "create {n} containing {t}",
            "write {t} into a new file {n}",
            "make a file {n} that says {t}",
            "put the text {t} in {n}",
        ),
        "create a file {n} holding {t}",
        ("create {n} with the text {t}", "write a new file {n} that says {t}"),
    ),
    "append": _phrases(
        (
            "append the line {w} to {n}",
            "add {w} at the end of {n}",
            "put the line {w} at the bottom of {n}",
            "extend {n} with the line {w}",
        ),
        "put {w} as the last line of {n}",
        ("add the line {w} to {n}", "append {w} at the end of {n}"),
    ),
    "delete": _phrases(
        ("delete {n}", "remove the file {n}", "get rid of {n}", "erase {n}"),
        "drop {n}",
        ("delete the file {n}", "remove {n}"),
    ),
    "rename": _phrases(
        (
            "rename {o} to {n}",
            "give {o} the new name {n}",
            "change the name of {o} to {n}",
            "call {o} {n} instead",
        ),
        "give the file {o} the name {n}",
        ("rename the file {o} as {n}", "change the file name {o} to {n}"),
    ),
    "copy": _phrases(
        ("copy {o} to {n}", "duplicate {o} as {n}", "make a copy of {o} named {n}", "clone {o} into {n}"),
        "make {n} a copy of {o}",
        ("copy the file {o} as {n}", "make a duplicate of {o} called {n}"),
    ),
    "move": _phrases(
        (
            "move {n} into a new folder {f}",
            "put {n} in a new folder {f}",
            "make a folder {f} and move {n} there",
            "create the folder {f} with {n} in it",
        ),
        "put {n} into the new directory {f}",
        ("make a new folder {f} and put {n} in it", "move {n} to a new folder called {f}"),
    ),
    "count": _phrases(
        (
            "write the number of lines of {a} to {b}",
            "count the lines of {a} into {b}",
            "put the line count of {a} in {b}",
            "say in {b} how many lines {a} has",
        ),
        "put how many lines {a} has into {b}",
        ("save the number of lines of {a} in {b}", "count the lines in {a} and write that to {b}"),
    ),
    "sort": _phrases(
        (
            "sort {a} into {b}",
            "put the sorted lines of {a} in {b}",
            "write {a} in alphabetical order to {b}",
            "order the lines of {a} and save them as {b}",
        ),
        "save {a} in sorted order as {b}",
        ("write the lines of {a}, sorted, to {b}", "sort the lines of {a} and put them in {b}"),
    ),
    "head": _phrases(
        (
            "write the first {k} lines of {a} to {b}",
            "put the top {k} lines of {a} in {b}",
            "take {k} lines from the start of {a} into {b}",
            "copy just the first {k} lines of {a} to {b}",
        ),
        "put the initial {k} lines of {a} into {b}",
        ("save the first {k} lines of {a} as {b}", "write the top {k} lines of {a} to {b}"),
    ),
    "extract": _phrases(
        (
            "write the lines of {a} with {w} to {b}",
            "put every line of {a} that contains {w} in {b}",
            "search {a} for {w} and save the lines in {b}",
            "copy the {w} lines of {a} to {b}",
        ),
        "save lines of {a} where {w} occurs as {b}",
        (
            "save the lines of {a} that contain {w} as {b}",
            "find the lines with {w} in {a} and write them to {b}",
        ),
    ),
    "replace": _phrases(
        (
            "replace {o} by {w} in {n}",
            "change every {o} in {n} to {w}",
            "in {n}, turn {o} into {w}",
            "substitute {w} for {o} in {n}",
        ),
        "make each {o} in {n} a {w}",
        ("replace every {o} with {w} in {n}", "in {n}, change {o} to {w}"),
    ),
    "find_and_delete": _phrases(
        (
            "delete the file that contains {w}",
            "find the file with {w} and remove it",
            "one file has {w} in it: erase it",
        ),
        "drop whichever file holds {w}",
        ("find the file that contains {w} and delete it", "remove the file with {w} in it"),
    ),
    "find_and_rename": _phrases(
        (
            "rename the file that contains {w} to {n}",
            "find the file with {w} and call it {n}",
            "one file has {w} in it: rename it to {n}",
        ),
        "give the name {n} to whichever file holds {w}",
        ("find the file that contains {w} and rename it to {n}", "rename the file with {w} in it as {n}"),
    ),
    "find_and_append": _phrases(
        (
            "append the line {l} to the file that contains {w}",
            "find the file with {w} and add the line {l}",
            "one file has {w} in it: put the line {l} at its end",
        ),
        "add {l} to whichever file holds {w}",
        (
            "find the file that contains {w} and append the line {l}",
            "add the line {l} to the file with {w} in it",
        ),
    ),
}
