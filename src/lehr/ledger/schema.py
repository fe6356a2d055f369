"""The tables of a run. A change here comes with a migration; a test holds the two together.

Times are seconds since the epoch. Text columns named ``*_json`` hold JSON. A group is in exactly one
state; ``trained`` and ``dropped`` are final, and a check ties each to its step or its reason.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

HEAD = "0002"
"""The newest migration. A ledger that is at it is opened without loading any migration tool."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

run = Table(
    "run",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", String, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("touched", Float, nullable=False),
    CheckConstraint("id = 1", name="single"),
)

stages = Table(
    "stages",
    metadata,
    Column("name", String, primary_key=True),
    Column("position", Integer, nullable=False, unique=True),
    Column("state", String, nullable=False),
    Column("detail", Text, nullable=False, server_default=""),
    CheckConstraint("state IN ('running', 'done')", name="state"),
)

stage_spans = Table(
    "stage_spans",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("stage", String, ForeignKey("stages.name"), nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("started", Float, nullable=False),
    Column("ended", Float),
)

groups = Table(
    "groups",
    metadata,
    Column("id", String, primary_key=True),
    Column("stage", String, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("domain", String, nullable=False),
    Column("task_id", String, nullable=False),
    Column("split", String, nullable=False),
    Column("task_index", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", String),
    Column("step", Integer),
    Column("drawn_version", Integer, nullable=False),
    Column("retries", Integer, nullable=False, server_default="0"),
    Column("created", Float, nullable=False),
    Column("ended", Float),
    CheckConstraint("state IN ('drawn', 'running', 'judged', 'complete', 'trained', 'dropped')", name="state"),
    CheckConstraint("(state = 'trained') = (step IS NOT NULL)", name="trained_at_a_step"),
    CheckConstraint("(state = 'dropped') = (reason IS NOT NULL)", name="dropped_for_a_reason"),
    CheckConstraint("(state IN ('trained', 'dropped')) = (ended IS NOT NULL)", name="ended"),
    UniqueConstraint("stage", "ordinal"),
    Index(None, "stage", "state"),
)

traces = Table(
    "traces",
    metadata,
    Column("id", String, primary_key=True),
    Column("group_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("retry", Integer, nullable=False, server_default="0"),
    Column("stage", String, nullable=False),
    Column("domain", String, nullable=False),
    Column("task_id", String, nullable=False),
    Column("blob", String, nullable=False),
    Column("reward_kind", String, nullable=False),
    Column("value", Float),
    Column("passed", Boolean(create_constraint=False), nullable=False),
    Column("reason", String, nullable=False, server_default=""),
    Column("detail", Text, nullable=False, server_default=""),
    Column("parts_json", Text, nullable=False, server_default="{}"),
    Column("own_tokens", Integer, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("created", Float, nullable=False),
    CheckConstraint("reward_kind IN ('valid', 'invalid')", name="reward_kind"),
    CheckConstraint("(reward_kind = 'valid') = (value IS NOT NULL)", name="valid_has_a_value"),
    Index(None, "group_id"),
    Index(None, "stage", "domain"),
)

batches = Table(
    "batches",
    metadata,
    Column("stage", String, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("state", String, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("recorded", Float, nullable=False),
    Column("applied", Float),
    CheckConstraint("state IN ('recorded', 'applied')", name="state"),
)

batch_groups = Table(
    "batch_groups",
    metadata,
    Column("group_id", String, ForeignKey("groups.id"), primary_key=True),
    Column("stage", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    ForeignKeyConstraint(["stage", "step"], ["batches.stage", "batches.step"]),
    UniqueConstraint("stage", "step", "position"),
)

replays = Table(
    "replays",
    metadata,
    Column("stage", String, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("trace_id", String, nullable=False),
    Column("group_id", String, ForeignKey("groups.id"), nullable=False),
    Column("advantage", Float, nullable=False),
    ForeignKeyConstraint(["stage", "step"], ["batches.stage", "batches.step"]),
    UniqueConstraint("stage", "step", "trace_id"),
)

uses = Table(
    "uses",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("group_id", String, ForeignKey("groups.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("replay", Boolean(create_constraint=False), nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("trace_id", String),
    Index(None, "group_id"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("stage", String, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("path", String, nullable=False),
    Column("state_json", Text, nullable=False),
    Column("created", Float, nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("label", String, primary_key=True),
    Column("task_id", String, primary_key=True),
    Column("domain", String, nullable=False),
    Column("trace_id", String, nullable=False),
    Column("blob", String, nullable=False),
    Column("passed", Boolean(create_constraint=False), nullable=False),
    Column("valid", Boolean(create_constraint=False), nullable=False),
    Column("version", Integer),
    Column("created", Float, nullable=False),
)

scheduler_states = Table(
    "scheduler_states",
    metadata,
    Column("stage", String, primary_key=True),
    Column("drawn", Integer, nullable=False),
    Column("state_json", Text, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    Column("fields_json", Text, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Index(None, "kind"),
)
