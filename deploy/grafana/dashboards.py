#!/usr/bin/env python3
"""Writes the dashboards for Grafana into dashboards/: deploy/grafana/dashboards.py [--check] [--runbook URL]

Change a dashboard here, then run this and commit both. --check writes nothing and fails if a file is not what this would
write. Thresholds and the alerts' sentences are read from ../prometheus/alerts.yml and ../../docs/alerts.md, so that a panel
cannot show another threshold than its alert has. --runbook is where panels lead; without it, to the copy of docs/alerts.md
that Grafana itself serves in the stack.
"""

import argparse
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
RUNBOOK = "/public/weir/alerts.txt"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH = 24

# Outcomes and statuses have the same colour on every panel: what was given, what was refused, what broke.
COLOURS = {
    "green": "accepted|allowed|disabled|answered|bought|new|sent|exported|passed|COMPLETED|2..",
    "blue": "replayed|existing|already_purchased|browser|CANCELLED|3..",
    "orange": "denied.*|not_configured|unknown_config|unknown_sku|exhausted|sold_out|not_active|throttled|limited|switched_off"
    "|conflict|key_conflict|retried|put_off|required|flagged|other|dropped|caller_gone|bad_path|too_large|4..",
    "red": "failed|malformed|given_up|dead|unreachable|timed_out|unreadable|cut_off|too_slow|stopping|FAILED.*|5..",
}


def read_alerts():
    """Returns each alert with its first threshold, of alerts.yml."""
    text = (HERE / "../prometheus/alerts.yml").read_text()
    thresholds = {}
    for block in text.split("- alert: ")[1:]:
        name, rest = block.split("\n", 1)
        expression = rest.split("expr:", 1)[1].split("labels:", 1)[0]
        found = re.search(r"(?:>|==) (-?[\d.]+)", expression)
        thresholds[name.strip()] = float(found.group(1)) if found else None
    return thresholds


def read_sentences():
    """Returns what each alert watches over, of the table in docs/alerts.md."""
    sentences = {}
    for line in (HERE / "../../docs/alerts.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3:
            for name in re.findall(r"`(Weir\w+)`", cells[1]):
                sentences[name] = cells[0]
    return sentences


THRESHOLDS, SENTENCES = read_alerts(), read_sentences()


class Query:
    def __init__(self, expression, legend):
        self.expression, self.legend = expression, legend


def rate(metric, by="outcome", where="", legend=None):
    """How many a second, by a label."""
    selector = f"{metric}{{{where}}}" if where else metric
    grouping = f" by ({by})" if by else ""
    return Query(f"sum{grouping} (rate({selector}[$__rate_interval]))", legend or f"{{{{{by}}}}}")


def quantile(value, metric, by="", where="", legend=None):
    selector = f"{metric}_bucket{{{where}}}" if where else f"{metric}_bucket"
    labels = f"le, {by}" if by else "le"
    expression = f"histogram_quantile({value}, sum by ({labels}) (rate({selector}[$__rate_interval])))"
    return Query(expression, legend or (f"{{{{{by}}}}}" if by else f"{value * 100:.0f}th percentile"))


def quantiles(metric, where=""):
    return [quantile(value, metric, where=where) for value in (0.5, 0.95, 0.99)]


def share(part, whole):
    """A share of two rates. A counter that nothing has moved yet is not there, so the part may be missing."""
    return f"(sum(rate({part}[$__rate_interval])) or vector(0)) / sum(rate({whole}[$__rate_interval]))"


class Panel:
    """A panel. The first of its alerts gives the threshold that it shows; all of them are named and linked."""

    def __init__(self, title, queries, unit="reqps", alerts=(), text="", kind="timeseries", width=8, height=8, **options):
        self.title, self.unit, self.kind, self.text = title, unit, kind, text
        self.queries = queries if isinstance(queries, list) else [queries]
        self.alerts, self.width, self.height, self.options = alerts, width, height, options

    def defaults(self):
        steps = [{"color": "green", "value": None}]
        threshold = self.options.get("threshold") or (THRESHOLDS[self.alerts[0]] if self.alerts else None)
        if threshold:
            steps.append({"color": "red", "value": threshold})
        defaults = {"unit": self.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
        if "max" in self.options:
            defaults["max"] = self.options["max"]
        if "names" in self.options:
            names = self.options["names"].items()
            options = {str(value): {"text": name, "color": colour} for value, (name, colour) in names}
            defaults["mappings"] = [{"type": "value", "options": options}]
        if self.kind == "timeseries":
            style = "line" if threshold else "off"
            defaults["custom"] = {"fillOpacity": 10, "showPoints": "never", "thresholdsStyle": {"mode": style}}
        return defaults

    def overrides(self):
        if self.kind != "timeseries" or not any("{{outcome}}" in q.legend or "{{status}}" in q.legend or
                                                "{{client}}" in q.legend for q in self.queries):
            return []
        return [
            {
                "matcher": {"id": "byRegexp", "options": f"/^({words})$/"},
                "properties": [{"id": "color", "value": {"mode": "shades", "fixedColor": colour}}],
            }
            for colour, words in COLOURS.items()
        ]

    def panel_options(self):
        if self.kind == "timeseries":
            calculations = self.options.get("legend", ["lastNotNull", "max"])
            return {
                "legend": {"displayMode": "table", "placement": "bottom", "calcs": calculations, "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}

    def json(self, number, x, y, runbook):
        lines = [self.text] if self.text else []
        lines += [f"**{alert}**: {SENTENCES[alert]}." for alert in self.alerts]
        panel = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": "\n\n".join(lines),
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self.defaults(), "overrides": self.overrides()},
            "options": self.panel_options(),
            "targets": [
                {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": q.expression, "legendFormat": q.legend}
                for i, q in enumerate(self.queries)
            ],
        }
        if self.alerts:
            panel["links"] = [{"title": f"Runbook: {', '.join(self.alerts)}", "url": runbook, "targetBlank": True}]
        return panel


def number(title, expression, unit="short", alerts=(), text="", threshold=None, width=4, **options):
    """A single figure, of now."""
    query = Query(expression, title)
    return Panel(title, query, unit, alerts, text, "stat", width, 4, threshold=threshold, **options)


def alerts_firing(names):
    expression = f'count(ALERTS{{alertname=~"{"|".join(names)}", alertstate="firing"}}) or vector(0)'
    return number("Alerts firing", expression, threshold=1, text="Red marks on the charts show since when.")


def lane(name):
    """What each lane of a capability does: calls that wait, how long, and in what batches."""
    where = f'lane="{name}"'
    return [
        Panel(
            f"Wait in the lane {name}",
            quantiles("weir_lane_wait_seconds", where),
            "s",
            text="How long the first call of each batch has waited for its turn.",
        ),
        Panel(
            f"Calls waiting in the lane {name}",
            [
                Query(f"sum by (instance) (weir_lane_depth{{{where}}})", "{{instance}}"),
            ],
            "short",
            text="Beyond `lane.capacity` on a server, calls are answered with 503.",
        ),
        Panel(
            f"Batches of the lane {name}",
            [
                Query(
                    f"sum(rate(weir_lane_batch_size_sum{{{where}}}[$__rate_interval]))"
                    f" / sum(rate(weir_lane_batch_size_count{{{where}}}[$__rate_interval]))",
                    "calls in a batch",
                ),
                rate("weir_lane_rejected_total", "", where, "refused a second: the lane was full"),
                rate("weir_lane_abandoned_total", "", where, "abandoned a second: the caller left"),
            ],
            "short",
            text="Batches grow under load: that is how one commit serves many calls.",
        ),
    ]


def http(routes, width=12):
    """Responses and latencies of some routes."""
    where = f'route=~"{routes}"'
    return [
        Panel("Responses by status", rate("weir_http_requests_total", "status", where), width=width),
        Panel("Time to the response", quantiles("weir_http_request_seconds", where), "s", width=width),
    ]


def failures(routes):
    where = f'route=~"{routes}"'
    whole = f"weir_http_requests_total{{{where}}}"
    return number("Calls that fail (5xx)", share(f'weir_http_requests_total{{{where}, status=~"5.."}}', whole), "percentunit",
                  threshold=0.0005, text="Availability of 99.95 % allows 0.05 %.")


def latency(routes):
    query = quantile(0.99, "weir_http_request_seconds", where=f'route=~"{routes}"')
    return number("99th percentile", query.expression, "s")


BREAKER = {0: ("closed", "green"), 1: ("half-open", "orange"), 2: ("open", "red")}
QUOTA_ROUTES, SLOT_ROUTES, REQUEST_ROUTES = "/api/send|/api/config.*", "/api/v1/slots.*", "/v1/requests.*"
CHECK_ROUTES, AI_ROUTES = "/v1/(check|refund|hold|settle|release)", "/api/v1/ai.*"
SALE_ROUTES = "/api/v1/(sales|purchases|products).*"
BURN_ALERTS = ("WeirErrorBudgetBurnsFast", "WeirErrorBudgetBurns", "WeirErrorBudgetBurnsSlowly", "WeirErrorBudgetSpent")


def by_capability(quota, slot, request, tier, checks, sale):
    """The rate of some outcomes, a line for each capability."""
    return [
        rate("weir_quota_sends_total", "", f'outcome=~"{quota}"', "quota"),
        rate("weir_slot_assignments_total", "", f'outcome=~"{slot}"', "slot"),
        rate("weir_request_accept_total", "", f'outcome=~"{request}"', "request"),
        rate("weir_tier_calls_total", "", f'outcome=~"{tier}"', "tier: AI calls"),
        rate("weir_tier_checks_total", "", f'outcome=~"{checks}"', "tier: checks"),
        rate("weir_sale_purchases_total", "", f'outcome=~"{sale}"', "sale"),
    ]


def overview():
    names = sorted(THRESHOLDS)
    return "Weir: overview", names, [
        ("Now", [
            alerts_firing(names),
            number("Calls", "sum(rate(weir_http_requests_total[$__rate_interval]))", "reqps"),
            failures(".*"),
            number("Error budget burn, 1 h", "weir:error_budget_burn:1h or vector(0)", alerts=BURN_ALERTS[:1],
                   text="At 1 a budget of 30 days (99.95 %) lasts 30 days."),
            number("Engines that do not answer", "count(min by (engine) (weir_engine_up) == 0) or vector(0)", threshold=1),
            number("Dead requests", "max(weir_dlq_depth)", alerts=("WeirDeadLetters",)),
        ]),
        ("Decisions", [
            Panel("Given", by_capability("accepted", "new", "accepted", "allowed|disabled", "allowed", "bought"),
                  text="Calls that got a share, without repetitions."),
            Panel("Refused", by_capability("denied.*", "exhausted", "limited", "denied.*", "denied", "sold_out|throttled"),
                  text="A denial is an answer. The capability's dashboard has the reasons."),
            Panel("Failed", by_capability(*["failed"] * 6), text="Calls without a decision, because something broke."),
        ]),
        ("Objective: 99.95 % of calls succeed", [
            Panel("Error budget burn",
                  [Query(f"weir:error_budget_burn:{window} or vector(0)", window) for window in ("5m", "30m", "1h", "2h", "6h", "1d", "3d")],
                  "short", BURN_ALERTS, "At 1 a budget of 30 days lasts 30 days. The line is the fastest alert's threshold.",
                  width=12),
            Panel("Failures by route", rate("weir_http_requests_total", "route", 'status=~"5.."'), width=12),
        ]),
        ("HTTP", [
            Panel("Calls by route", rate("weir_http_requests_total", "route")),
            Panel("Responses by status", rate("weir_http_requests_total", "status")),
            Panel("Latency by route, 99th percentile", quantile(0.99, "weir_http_request_seconds", "route"), "s"),
            Panel("Connections", [
                Query("sum by (instance) (weir_http_connections)", "{{instance}}"),
                Query("sum by (instance) (weir_http_long_lived)", "{{instance}}: streams and long polls"),
            ], "short"),
            Panel("Refused for lack of a resource", [
                rate("weir_http_shortages_total", "of"),
                rate("weir_http_connections_held_total", "", legend="came while http.max_connections were open"),
            ], text="Answered with 503: raise the bound, or add servers."),
            Panel("Memory of unfinished requests", Query("sum by (instance) (weir_http_buffered_bytes)", "{{instance}}"), "bytes"),
        ]),
        ("Lanes and backlog", [
            Panel("Wait in lanes, 99th percentile", quantile(0.99, "weir_lane_wait_seconds", "lane"), "s"),
            Panel("Requests by state", Query("sum by (state) (max by (downstream, state) (weir_request_jobs))", "{{state}}"),
                  "short", ("WeirBacklogUnknown",)),
            Panel("Oldest work", [
                Query("max(weir_request_oldest_waiting_seconds)", "due request"),
                Query("max(weir_reconciler_backlog_age_seconds)", "unpublished request"),
                Query("max(weir_tier_unsaved_seconds)", "unsaved spending"),
            ], "s", ("WeirJobsWaiting", "WeirReconciliationBehind", "WeirTierUnsaved")),
            Panel("Dead letters", [
                Query("max(weir_dlq_depth)", "requests"),
                Query("max by (topic) (weir_dead_letters)", "{{topic}}"),
            ], "short", ("WeirDeadLetters", "WeirDeadWebhooks", "WeirDeadMessages", "WeirDeadPurchases")),
            Panel("Steps of clocks", Query("sum by (clock) (increase(weir_clock_steps_total[10m]))", "{{clock}}"), "short",
                  ("WeirClockStepped",)),
            Panel("Spans of sampled traces", rate("weir_trace_spans_total")),
        ]),
    ]


def quota():
    names = ["WeirDeadMessages", "WeirSmsProviderDown", "WeirEngineDown"]
    sends = "weir_quota_sends_total"
    return "Weir: quota", names, [
        ("Now", [
            alerts_firing(names),
            number("Sends", f"sum(rate({sends}[$__rate_interval]))", "reqps"),
            number("Denied", share(f'{sends}{{outcome=~"denied.*"}}', sends), "percentunit"),
            failures(QUOTA_ROUTES),
            latency("/api/send"),
            number("SMS provider", "max(weir_quota_provider_breaker_state)", names=BREAKER,
                   text="The circuit breaker of `sender.url`."),
        ]),
        ("Decisions", [
            Panel("Sends by outcome", rate(sends), width=12,
                  text="`denied_from_memory` was refused without asking the engine."),
            Panel("Why sends were refused", rate(sends, where='outcome!~"accepted|replayed"'), width=12),
            *http(QUOTA_ROUTES),
        ]),
        ("Deliveries", [
            Panel("Messages by outcome", rate("weir_quota_deliveries_total"), alerts=("WeirDeadMessages",)),
            Panel("Accepted but not delivered yet", [
                rate(sends, "", 'outcome="accepted"', "accepted"),
                rate("weir_quota_deliveries_total", "", 'outcome="sent"', "delivered"),
            ], text="While the first is above the second, messages wait in the queue."),
            Panel("Breaker of the SMS provider", Query("weir_quota_provider_breaker_state", "{{instance}}"), "short",
                  ("WeirSmsProviderDown",), names=BREAKER, max=2),
            Panel("Dead messages", Query('max(weir_dead_letters{topic="sms-outbound"})', "dead"), "short",
                  ("WeirDeadMessages",), "With Kafka they are on the topic `sms-outbound.dlq` instead."),
            Panel("Idempotency keys deleted", rate("weir_quota_keys_purged_total", "", legend="expired")),
            Panel("Hashes forgotten in Redis", rate("weir_quota_cache_forgotten_total", "", legend="limits changed")),
        ]),
        ("Engine", lane("quota") + [
            Panel("Calls of Redis by script, 99th percentile", quantile(0.99, "weir_redis_call_seconds", "call"), "s"),
        ]),
    ]


def slot():
    names = ["WeirEngineDown", "WeirWriterHeld"]
    assignments = "weir_slot_assignments_total"
    return "Weir: slot", names, [
        ("Now", [
            alerts_firing(names),
            number("Events", f"sum(rate({assignments}[$__rate_interval]))", "reqps"),
            number("New slots", f'sum(rate({assignments}{{outcome="new"}}[$__rate_interval]))', "reqps"),
            number("Without a window", share(f'{assignments}{{outcome="exhausted"}}', assignments), "percentunit"),
            failures(SLOT_ROUTES),
            latency("/api/v1/slots"),
        ]),
        ("Decisions", [
            Panel("Events by outcome", rate(assignments), width=12),
            Panel("Why events got no slot", rate(assignments, where='outcome!~"new|existing"'), width=12,
                  text="`exhausted`: no window in reach has room. `unknown_config`: nobody has made that config."),
            *http(SLOT_ROUTES),
        ]),
        ("Dispatch", [
            Panel("Slots published when their time came", rate("weir_slot_dispatched_total", "", legend="published"), width=12),
            Panel("Assigned and published", [
                rate(assignments, "", 'outcome="new"', "assigned"),
                rate("weir_slot_dispatched_total", "", legend="published"),
            ], width=12, text="Over a long range both agree, if `slot.dispatch.topic` is set."),
        ]),
        ("Engine", lane("slot")),
    ]


def request():
    names = ["WeirAcceptanceSlow", "WeirAcceptanceVerySlow", "WeirStatusReadsSlow", "WeirRequestErrors", "WeirDeadLetters",
             "WeirCompletionRate", "WeirDuplicateCalls", "WeirJobsWaiting", "WeirDeadWebhooks", "WeirBacklogUnknown",
             "WeirReconciliationBehind", "WeirReconcilerMissing", "WeirBreakerOpen"]
    accepts, finished = "weir_request_accept_total", "weir_request_finished_total"
    return "Weir: request", names, [
        ("Now", [
            alerts_firing(names),
            number("Submissions", f"sum(rate({accepts}[$__rate_interval]))", "reqps"),
            number("Accepted within, 99th percentile", quantile(0.99, "weir_request_accept_latency_seconds").expression, "s",
                   ("WeirAcceptanceVerySlow",)),
            number("Waiting", 'sum(max by (downstream) (weir_request_jobs{state="waiting"}))',
                   text="Counts stop at 10,000 for a downstream; the age goes on."),
            number("Oldest due request", "max(weir_request_oldest_waiting_seconds)", "s", ("WeirJobsWaiting",)),
            number("Dead requests", "max(weir_dlq_depth)", alerts=("WeirDeadLetters",)),
        ]),
        ("Acceptance", [
            Panel("Submissions by outcome", rate(accepts)),
            Panel("Why submissions were refused", rate(accepts, where='outcome!~"accepted|replayed"')),
            Panel("Calls of the API that fail", Query(
                f'((sum(rate(weir_http_requests_total{{route=~"{REQUEST_ROUTES}", status=~"5.."}}[$__rate_interval])) or vector(0))'
                f' - (sum(rate({accepts}{{outcome="switched_off"}}[$__rate_interval])) or vector(0)))'
                f' / sum(rate(weir_http_requests_total{{route=~"{REQUEST_ROUTES}"}}[$__rate_interval]))', "failed"),
                "percentunit", ("WeirRequestErrors",)),
            Panel("Acceptance, 95th percentile", quantile(0.95, "weir_request_accept_latency_seconds"), "s",
                  ("WeirAcceptanceSlow",)),
            Panel("Acceptance, 99th percentile", quantile(0.99, "weir_request_accept_latency_seconds"), "s",
                  ("WeirAcceptanceVerySlow",)),
            Panel("Status queries, 95th percentile", quantile(0.95, "weir_request_read_latency_seconds"), "s",
                  ("WeirStatusReadsSlow",), "Long polls do not count."),
        ]),
        ("Backlog", [
            Panel("Requests by state", Query("sum by (state) (max by (downstream, state) (weir_request_jobs))", "{{state}}"),
                  "short", ("WeirBacklogUnknown",)),
            Panel("Requests by downstream", Query("sum by (downstream) (max by (downstream, state) (weir_request_jobs))",
                                                  "{{downstream}}"), "short"),
            Panel("Oldest due request", Query("max by (downstream) (weir_request_oldest_waiting_seconds)", "{{downstream}}"), "s",
                  ("WeirJobsWaiting",)),
            Panel("Oldest unpublished request", Query("max(weir_reconciler_backlog_age_seconds)", "waits for the broker"), "s",
                  ("WeirReconciliationBehind",)),
            Panel("Since the reconciler ran", Query("time() - max(weir_reconciler_heartbeat_seconds > 0)", "seconds"), "s",
                  ("WeirReconcilerMissing",)),
            Panel("Dead requests and webhooks", [
                Query("max(weir_dlq_depth)", "requests"),
                Query('max(weir_dead_letters{topic="request-webhooks"})', "webhooks"),
            ], "short", ("WeirDeadLetters", "WeirDeadWebhooks")),
        ]),
        ("Work", [
            Panel("Requests that ended, by status", rate(finished, "status")),
            Panel("Not completed, over 1 h", Query(
                f'sum(increase({finished}{{status="FAILED_RETRY_EXHAUSTED"}}[1h]))'
                f' / sum(increase({finished}{{status!="FAILED_PERMANENT"}}[1h]))', "without an attempt left"),
                "percentunit", ("WeirCompletionRate",)),
            Panel("From claim to report", quantiles("weir_worker_processing_latency_seconds"), "s",
                  text="A call of a downstream and its durable report."),
            Panel("Attempts that are repeated", [
                rate("weir_worker_retry_count_total", "", legend="failed, tried again"),
                rate("weir_request_duplicate_calls_total", "", legend="may be a repetition"),
            ]),
            Panel("Repeated calls, over 1 h", Query(
                "sum(rate(weir_request_duplicate_calls_total[1h])) / sum(rate(weir_worker_processing_latency_seconds_count[1h]))",
                "of all calls"), "percentunit", ("WeirDuplicateCalls",)),
            Panel("Breakers", Query("max by (downstream) (weir_request_breaker_state)", "{{downstream}}"), "short",
                  ("WeirBreakerOpen",), names=BREAKER, max=2),
            Panel("Webhooks by outcome", rate("weir_request_webhooks_total"), alerts=("WeirDeadWebhooks",)),
            *http(REQUEST_ROUTES, 8),
        ]),
        ("Engine", lane("request")),
    ]


def tier():
    names = ["WeirTierAlone", "WeirTierUnsaved", "WeirEngineDown"]
    calls, checks = "weir_tier_calls_total", "weir_tier_checks_total"
    return "Weir: tier", names, [
        ("Now", [
            alerts_firing(names),
            number("AI calls", f"sum(rate({calls}[$__rate_interval]))", "reqps"),
            number("AI calls denied", share(f'{calls}{{outcome=~"denied.*"}}', calls), "percentunit"),
            number("Checks", f"sum(rate({checks}[$__rate_interval]))", "reqps"),
            number("Checks denied", share(f'{checks}{{outcome="denied"}}', checks), "percentunit"),
            number("Unsaved for", "max(weir_tier_unsaved_seconds)", "s", ("WeirTierUnsaved",)),
        ]),
        ("Decisions", [
            Panel("AI calls by outcome", rate(calls)),
            Panel("Why AI calls were denied", rate(calls, where='outcome=~"denied.*"'),
                  text="`denied_minute`: the bucket is empty. `denied_daily`: the day is spent."),
            Panel("Checks by outcome", rate(checks)),
            Panel("Would have been denied", rate("weir_tier_shadow_denied_total", "", legend="by a shadow policy"),
                  text="What a policy in `shadow` would deny if it were enforced."),
            Panel("Tokens with an unknown plan", rate("weir_tier_unknown_plan_claims_total", "", legend="AI calls")),
            Panel("Decided without Redis", rate("weir_tier_decided_alone_total", "instance"), alerts=("WeirTierAlone",)),
            *http(CHECK_ROUTES),
        ]),
        ("What was spent", [
            Panel("Keys whose last change is not saved", Query("sum by (instance) (weir_tier_unsaved)", "{{instance}}"), "short",
                  width=12),
            Panel("For how long it could not be saved", Query("max by (instance) (weir_tier_unsaved_seconds)", "{{instance}}"),
                  "s", ("WeirTierUnsaved",), width=12),
        ]),
        ("Engine", lane("tier") + lane("permit") + [
            Panel("Calls of Redis by script, 99th percentile", quantile(0.99, "weir_redis_call_seconds", "call"), "s"),
        ]),
    ]


def gateway():
    names = ["WeirTierAlone", "WeirTierUnsaved"]
    calls = "weir_ai_calls_total"
    return "Weir: gateway", names, [
        ("Now", [
            alerts_firing(names),
            number("Calls to the upstream", f"sum(rate({calls}[$__rate_interval]))", "reqps"),
            number("Not answered", share(f'{calls}{{outcome!="answered"}}', calls), "percentunit"),
            number("First byte, 99th percentile", quantile(0.99, "weir_ai_first_byte_seconds").expression, "s"),
            number("Denied by plan", share('weir_tier_calls_total{outcome=~"denied.*"}', "weir_tier_calls_total"), "percentunit"),
            number("Open WebSockets", "sum(weir_ai_tunnels)"),
        ]),
        ("Upstream", [
            Panel("Calls by outcome", rate(calls)),
            Panel("Why calls were not answered", rate(calls, where='outcome!="answered"'),
                  text="`unreachable` and `timed_out` are the upstream's; `caller_gone`, `bad_path` and `too_large` the caller's."),
            Panel("Until the upstream's first byte", quantiles("weir_ai_first_byte_seconds"), "s"),
            Panel("Responses by status", rate("weir_http_requests_total", "status", f'route=~"{AI_ROUTES}"'),
                  text="With those of the upstream, which the error budget leaves out."),
            Panel("Open WebSockets", Query("sum by (instance) (weir_ai_tunnels)", "{{instance}}"), "short"),
            Panel("Admission by plan", rate("weir_tier_calls_total"), text="What tier decided before the call was made."),
        ]),
    ]


def sale():
    names = ["WeirSaleMismatch", "WeirSaleBehind", "WeirDeadPurchases", "WeirAddressFast", "WeirSaleRobots",
             "WeirSaleRejections", "WeirSaleStreams", "WeirEngineDown"]
    purchases, clients = "weir_sale_purchases_total", "weir_sale_clients_total"
    return "Weir: sale", names, [
        ("Now", [
            alerts_firing(names),
            number("Units sold", f'sum(rate({purchases}{{outcome="bought"}}[$__rate_interval]))', "reqps"),
            number("Attempts", f"sum(rate({purchases}[$__rate_interval]))", "reqps"),
            failures(SALE_ROUTES),
            latency("/api/v1/purchases"),
            number("Not written down yet", "max(weir_sale_queue_depth)", alerts=("WeirSaleBehind",)),
        ]),
        ("Buyers", [
            Panel("Attempts by outcome", rate(purchases)),
            Panel("Why attempts were refused", rate(purchases, where='outcome!="bought"')),
            Panel("Refused though units are left", Query(
                share(f'{purchases}{{outcome!~"bought|sold_out"}}', f'{purchases}{{outcome!="sold_out"}}'), "of the attempts"),
                "percentunit", ("WeirSaleRejections",), max=1),
            *http(SALE_ROUTES, 8),
            Panel("Challenges", rate("weir_sale_challenges_total")),
        ]),
        ("Books", [
            Panel("Purchases that only Redis has", Query("max(weir_sale_queue_depth)", "purchases"), "short",
                  ("WeirSaleBehind",), "At 3,000 buyers wait for the store."),
            Panel("Differences between Redis and the store",
                  Query("sum(increase(weir_reconciliation_mismatches_total[10m]))", "put right in 10 min"), "short",
                  ("WeirSaleMismatch",)),
            Panel("Dead purchases", Query('max(weir_dead_letters{topic="sale-purchases"})', "dead"), "short",
                  ("WeirDeadPurchases",)),
        ]),
        ("Streams and robots", [
            Panel("Open event streams", Query("sum by (instance) (weir_sale_streams)", "{{instance}}"), "short",
                  ("WeirSaleStreams",)),
            Panel("Events published", rate("weir_sale_events_total", "", legend="events")),
            Panel("Attempts by kind of client", rate(clients, "client")),
            Panel("Attempts that name no browser", Query(share(f'{clients}{{client="other"}}', clients), "of the attempts"),
                  "percentunit", ("WeirSaleRobots",), max=1),
            Panel("Refused: too many from one address", rate("weir_edge_limited_total", "", legend="refused")),
            Panel("Beyond 500 a second from one address", rate("weir_edge_fast_total", "instance"), alerts=("WeirAddressFast",)),
        ]),
        ("Engine", lane("sale") + [
            Panel("Calls of Redis by script, 99th percentile", quantile(0.99, "weir_redis_sale_call_seconds", "call"), "s"),
        ]),
    ]


def idempotency():
    names = ["WeirDuplicateCalls", "WeirRequestErrors"]
    accepts, sends = "weir_request_accept_total", "weir_quota_sends_total"
    return "Weir: idempotency", names, [
        ("Now", [
            alerts_firing(names),
            number("Conflicts of requests, 1 h", "sum(increase(weir_idempotency_conflict_total[1h]))", threshold=1),
            number("Conflicts of sends, 1 h", f'sum(increase({sends}{{outcome="key_conflict"}}[1h]))', threshold=1),
            number("Submissions in conflict", share(f'{accepts}{{outcome="conflict"}}', accepts), "percentunit"),
            number("Submissions repeated", share(f'{accepts}{{outcome="replayed"}}', accepts), "percentunit"),
            number("Calls that may be repeated, 1 h", "sum(increase(weir_request_duplicate_calls_total[1h]))"),
        ]),
        ("Conflicts: one key, another payload", [
            Panel("Conflicts", [
                rate("weir_idempotency_conflict_total", "", legend="request"),
                rate(sends, "", 'outcome="key_conflict"', "quota"),
            ], text="A caller uses one key for two things: 409 `IDEMPOTENCY_PAYLOAD_CONFLICT`. The log has a line for each, with"
                    " tenant and key. A bug of a caller, not of a server."),
            Panel("Conflicts by server", rate("weir_idempotency_conflict_total", "instance"),
                  text="On one server alone: a caller that is bound to it. On all: a release of a caller."),
            Panel("Answers with 409 by route", rate("weir_http_requests_total", "route", 'status="409"'),
                  text="Also other refusals than conflicts of keys."),
        ]),
        ("Repetitions: one key, the same payload", [
            Panel("Repeated calls", [
                rate(accepts, "", 'outcome="replayed"', "request"),
                rate(sends, "", 'outcome="replayed"', "quota"),
                rate("weir_slot_assignments_total", "", 'outcome="existing"', "slot"),
                rate("weir_sale_purchases_total", "", 'outcome="already_purchased"', "sale"),
            ], text="Answered as the first time and counted once. Many of them: callers give up too soon, or retry too fast."),
            Panel("Share of repetitions", [
                Query(share(f'{accepts}{{outcome="replayed"}}', accepts), "request"),
                Query(share(f'{sends}{{outcome="replayed"}}', sends), "quota"),
            ], "percentunit", max=1),
            Panel("Submissions answered within", quantiles("weir_request_accept_latency_seconds"), "s", ("WeirAcceptanceSlow",),
                  "Callers repeat what takes longer than they wait."),
        ]),
        ("Past the key", [
            Panel("Calls of downstreams that may be repeated", rate("weir_request_duplicate_calls_total", "", legend="calls"),
                  text="A worker crashed, or had not reported within its lease. The downstream sees the same Idempotency-Key.",
                  width=12),
            Panel("Of all calls, over 1 h", Query(
                "sum(rate(weir_request_duplicate_calls_total[1h])) / sum(rate(weir_worker_processing_latency_seconds_count[1h]))",
                "repeated"), "percentunit", ("WeirDuplicateCalls",), width=12),
        ]),
    ]


def engines():
    names = ["WeirEngineDown", "WeirRedisScriptsSlow", "WeirWriterHeld", "WeirBacklogUnknown", "WeirClockStepped"]

    def calls(title, engine, by="call"):
        metric = f"weir_{engine}_call_seconds"
        return [
            Panel(f"{title}: calls", rate(f"{metric}_count", by)),
            Panel(f"{title}: median", quantile(0.5, metric, by), "s"),
            Panel(f"{title}: 99th percentile", quantile(0.99, metric, by), "s"),
        ]

    return "Weir: engines", names, [
        ("Now", [
            alerts_firing(names),
            Panel("Which engine answers", Query("min by (engine) (weir_engine_up)", "{{engine}}"), "short", kind="stat", width=12,
                  height=4, alerts=("WeirEngineDown",), names={0: ("down", "red"), 1: ("up", "green")}),
            number("Slow scripts of Redis", "max(rate(weir_redis_slow_scripts_total[5m]) / rate(weir_redis_scripts_total[5m]))",
                   "percentunit", ("WeirRedisScriptsSlow",)),
            number("Turns of the writer > 50 ms, 10 min", "sum(increase(weir_sqlite_writer_held_too_long_total[10m]))",
                   alerts=("WeirWriterHeld",)),
        ]),
        ("Availability", [
            Panel("Servers for which an engine answers", Query("sum by (engine) (weir_engine_up)", "{{engine}}"), "short",
                  ("WeirEngineDown",)),
            Panel("Redis: scripts", [
                Query("max(rate(weir_redis_scripts_total[$__rate_interval]))", "all"),
                Query("max(rate(weir_redis_slow_scripts_total[$__rate_interval]))", "of more than 1 ms"),
            ], alerts=(), text="Redis's own counts, of all its clients."),
            Panel("Redis: slow scripts", Query(
                "max(rate(weir_redis_slow_scripts_total[5m]) / rate(weir_redis_scripts_total[5m]))", "of all scripts"),
                "percentunit", ("WeirRedisScriptsSlow",)),
        ]),
        ("Postgres", calls("Postgres", "postgresql")),
        ("Redis", calls("Redis", "redis") + calls("Redis, sales", "redis_sale")),
        ("Kafka", calls("Kafka", "kafka")),
        ("SQLite", calls("SQLite", "sqlite") + [
            Panel("Turns of the writer", quantiles("weir_sqlite_writer_held_seconds"), "s"),
            Panel("Commits, with their fsync", quantiles("weir_sqlite_writer_commit_seconds"), "s", text="The disk."),
            Panel("Turns of more than 50 ms, 10 min",
                  Query("increase(weir_sqlite_writer_held_too_long_total[10m])", "{{instance}}"), "short", ("WeirWriterHeld",)),
        ]),
    ]


DASHBOARDS = [overview, quota, slot, request, tier, gateway, sale, idempotency, engines]


def place(rows, runbook):
    """Lays panels out in rows of 24 columns, under the headings of their sections."""
    panels, y = [], 0
    for heading, content in rows:
        panels.append({"id": len(panels) + 1, "type": "row", "title": heading, "collapsed": False, "panels": [],
                       "datasource": DATASOURCE, "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}})
        x, y, height = 0, y + 1, 0
        for panel in content:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append(panel.json(len(panels) + 1, x, y, runbook))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return panels


def dashboard(name, build, runbook):
    title, alerts, rows = build()
    return {
        "uid": f"weir-{name}",
        "title": title,
        "tags": ["weir"],
        "schemaVersion": 41,
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": False,
        "graphTooltip": 1,
        "links": [
            {"type": "dashboards", "title": "Weir", "tags": ["weir"], "asDropdown": True, "keepTime": True},
            {"type": "link", "title": "Runbook", "url": runbook, "targetBlank": True, "icon": "doc"},
        ],
        "annotations": {"list": [{
            "name": "Alerts",
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": "red",
            "expr": f'ALERTS{{alertname=~"{"|".join(alerts)}", alertstate="firing"}}',
            "titleFormat": "{{alertname}}",
        }]},
        "panels": place(rows, runbook),
    }


def main():
    parser = argparse.ArgumentParser(description="Writes the dashboards for Grafana.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("--runbook", default=RUNBOOK, metavar="URL", help="where panels lead (default: %(default)s)")
    arguments = parser.parse_args()
    directory, differing = HERE / "dashboards", []
    expected = {f"{build.__name__}.json": dashboard(build.__name__, build, arguments.runbook) for build in DASHBOARDS}
    for path in directory.glob("*.json"):
        if path.name not in expected:
            differing.append(path.name)
            if not arguments.check:
                path.unlink()
    for name, value in expected.items():
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        path = directory / name
        if not path.exists() or path.read_text() != text:
            differing.append(name)
            if not arguments.check:
                path.write_text(text)
    if arguments.check and differing:
        sys.exit(f"run deploy/grafana/dashboards.py and commit what it writes: {', '.join(sorted(differing))}")


if __name__ == "__main__":
    main()
