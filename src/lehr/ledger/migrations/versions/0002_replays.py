"""replays: single traces that a later step trained again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "replays",
        sa.Column("stage", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("trace_id", sa.String(), nullable=False),
        sa.Column("group_id", sa.String(), nullable=False),
        sa.Column("advantage", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_replays_group_id")),
        sa.ForeignKeyConstraint(
            ["stage", "step"], ["batches.stage", "batches.step"], name=op.f("fk_replays_stage")
        ),
        sa.PrimaryKeyConstraint("stage", "step", "position", name=op.f("pk_replays")),
        sa.UniqueConstraint("stage", "step", "trace_id", name=op.f("uq_replays_stage_step_trace_id")),
    )
    op.add_column("uses", sa.Column("trace_id", sa.String(), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("uses", "trace_id")
    op.drop_table("replays")
