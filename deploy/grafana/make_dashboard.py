"""Writes dashboards/draftwire.json: python deploy/grafana/make_dashboard.py. One place for the queries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WINDOW = "[$__rate_interval]"


def _quantiles(metric: str) -> list[tuple[str, str]]:
    return [
        (f"p{percent}", f"histogram_quantile({percent / 100}, sum by (le) (rate({metric}_bucket{WINDOW})))")
        for percent in (50, 90, 99)
    ]


def _phases(job: str) -> list[tuple[str, str]]:
    """Return the shares of the time of an engine's thread."""
    selected = f'{{job="{job}"}}{WINDOW}'
    return [
        ("{{phase}}", f"avg by (phase) (rate(draftwire_step_time_seconds_sum{selected}))"),
        ("idle", f"avg(rate(draftwire_idle_seconds_total{selected}))"),
    ]


# (title, unit, [(legend, query)])
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Requests",
        "short",
        [("running", "sum(draftwire_num_requests_running)"), ("waiting", "sum(draftwire_num_requests_waiting)")],
    ),
    (
        "Tokens per second",
        "short",
        [
            ("generated", f"sum(rate(draftwire_generation_tokens_total{WINDOW}))"),
            ("prompt", f"sum(rate(draftwire_prompt_tokens_total{WINDOW}))"),
        ],
    ),
    ("Time to first token", "s", _quantiles("draftwire_time_to_first_token_seconds")),
    ("Inter-token latency", "s", _quantiles("draftwire_inter_token_latency_seconds")),
    ("Time per output token", "s", _quantiles("draftwire_request_time_per_output_token_seconds")),
    ("Latency of a whole request", "s", _quantiles("draftwire_e2e_request_latency_seconds")),
    (
        "Acceptance length",
        "short",
        [
            (
                "steps with drafts",
                f"1 + sum(rate(draftwire_spec_decode_num_accepted_tokens_total{WINDOW})) "
                f"/ sum(rate(draftwire_spec_decode_num_drafts_total{WINDOW}))",
            ),
            (
                "all verify steps",
                f"sum(rate(draftwire_acceptance_length_sum{WINDOW})) "
                f"/ sum(rate(draftwire_acceptance_length_count{WINDOW}))",
            ),
        ],
    ),
    (
        "Share of verify steps of at most so many tokens",
        "percentunit",
        [
            (
                "{{le}}",
                f"sum by (le) (rate(draftwire_acceptance_length_bucket{WINDOW})) "
                f"/ ignoring(le) group_left sum(rate(draftwire_acceptance_length_count{WINDOW}))",
            )
        ],
    ),
    (
        "Acceptance rate by position",
        "percentunit",
        [
            (
                "position {{position}}",
                f"sum by (position) (rate(draftwire_spec_decode_num_accepted_tokens_per_pos_total{WINDOW})) "
                f"/ sum by (position) (rate(draftwire_spec_decode_num_draft_tokens_per_pos_total{WINDOW}))",
            )
        ],
    ),
    (
        "Verifier's time by phase",
        "percentunit",
        _phases("verifier"),
    ),
    (
        "Drafter's time by phase",
        "percentunit",
        _phases("drafter"),
    ),
    (
        "Median of a verifier's step by phase",
        "s",
        [
            (
                "{{phase}}",
                "histogram_quantile(0.5, sum by (le, phase) "
                f'(rate(draftwire_step_time_seconds_bucket{{job="verifier"}}{WINDOW})))',
            )
        ],
    ),
    ("Time of a draft step", "s", _quantiles("draftwire_draft_step_seconds")),
    (
        "Drafters' queues",
        "short",
        [
            ("steps unanswered", "sum(draftwire_draft_steps_unanswered)"),
            ("rows waiting", "sum(draftwire_draft_rows_waiting)"),
        ],
    ),
    (
        "Sequences evicted from drafters per second",
        "short",
        [("evictions", f"sum(rate(draftwire_draft_evictions_total{WINDOW}))")],
    ),
    (
        "Drafters by state, as the verifiers see them",
        "short",
        [("{{state}}", "sum by (state) (draftwire_drafter_state)")],
    ),
    (
        "Sequences at each drafter",
        "short",
        [("{{drafter}}", "sum by (drafter) (draftwire_drafter_sequences)")],
    ),
    (
        "Share of tokens without drafts, by cause",
        "percentunit",
        [
            (
                "{{cause}}",
                f"sum by (cause) (rate(draftwire_fallback_tokens_total{WINDOW})) "
                f"/ ignoring(cause) group_left sum(rate(draftwire_generation_tokens_total{WINDOW}))",
            )
        ],
    ),
    (
        "Wire, bytes per second, as the verifiers count them",
        "Bps",
        [
            (
                "{{content}} {{direction}} by {{carrier}}",
                f'sum by (carrier, direction, content) (rate(draftwire_wire_bytes_total{{job="verifier"}}{WINDOW}))',
            )
        ],
    ),
    ("KV cache in use", "percentunit", [("{{job}} {{instance}}", "draftwire_kv_cache_usage_perc")]),
    (
        "Share of prompt tokens found in the prefix cache",
        "percentunit",
        [
            (
                "hits",
                f"sum(rate(draftwire_prefix_cache_hits_total{WINDOW})) "
                f"/ sum(rate(draftwire_prefix_cache_queries_total{WINDOW}))",
            )
        ],
    ),
    (
        "Requests ended per second, preemptions",
        "short",
        [
            ("{{finished_reason}}", f"sum by (finished_reason) (rate(draftwire_request_success_total{WINDOW}))"),
            ("refused", f"sum(rate(draftwire_requests_refused_total{WINDOW}))"),
            ("preemptions", f"sum(rate(draftwire_num_preemptions_total{WINDOW}))"),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Return the dashboard: two panels a row."""
    return {
        "uid": "draftwire",
        "title": "Draftwire",
        "schemaVersion": 39,
        "time": {"from": "now-15m", "to": "now"},
        "refresh": "5s",
        "panels": [
            {
                "id": index + 1,
                "type": "timeseries",
                "title": title,
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
                    for place, (legend, query) in enumerate(queries)
                ],
            }
            for index, (title, unit, queries) in enumerate(PANELS)
        ],
    }


def main() -> None:
    """Write the file."""
    path = Path(__file__).parent / "dashboards" / "draftwire.json"
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
