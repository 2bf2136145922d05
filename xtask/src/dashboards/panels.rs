//! What the dashboards show. Every series is one of docs/metrics.md.

use super::{Dashboard, Panel, Show};

/// Every dashboard.
pub(crate) const ALL: &[Dashboard] = &[FLEET, HOST, ROOM];

const FLEET: Dashboard = Dashboard {
    uid: "roomtrace-fleet",
    title: "Roomtrace / Fleet",
    about: "Pinned rooms of all hosts, who owes the next move, how long phases take, what was lost and what it costs.",
    one_host: false,
    room: false,
    panels: &[
        Panel {
            title: "Pinned",
            about: "Rooms with a second source besides silence. This is what pages.",
            show: Show::Number(1),
            unit: "short",
            size: (5, 4),
            queries: &[(
                "sum(roomtrace_rooms_pinned{instance=~\"$instance\", confidence=~\"likely|certain\"}) or vector(0)",
                "pinned",
            )],
        },
        Panel {
            title: "Only silent",
            about: "Nothing but silence speaks for a pin. Never paged.",
            show: Show::Number(1000),
            unit: "short",
            size: (5, 4),
            queries: &[(
                "sum(roomtrace_rooms_pinned{instance=~\"$instance\", confidence=\"possible\"}) or vector(0)",
                "silent",
            )],
        },
        Panel {
            title: "Oldest open room",
            about: "Of all hosts. Engines end rooms by timers after 300 s.",
            show: Show::Number(600),
            unit: "s",
            size: (5, 4),
            queries: &[(
                "max(roomtrace_oldest_open_room_age_seconds{instance=~\"$instance\"}) or vector(0)",
                "oldest",
            )],
        },
        Panel {
            title: "Agents that answer",
            about: "Hosts that are watched now.",
            show: Show::Number(100_000),
            unit: "short",
            size: (4, 4),
            queries: &[("count(roomtrace_build_info{instance=~\"$instance\"}) or vector(0)", "agents")],
        },
        Panel {
            title: "Lost in the last hour",
            about: "What should have been seen and was not; verdicts that rest on it are unknown.",
            show: Show::Number(1),
            unit: "short",
            size: (5, 4),
            queries: &[(
                "sum(increase(roomtrace_capture_lost_total{instance=~\"$instance\", reason!=\"mptcp\"}[1h])) or vector(0)",
                "lost",
            )],
        },
        Panel {
            title: "Who owes the next move",
            about: "Pinned rooms by verdict and pair of hosts: `instance` sees the room, `owed_instance` owes the next move to it. Where both \
                    are one host it owes to another, whose own agent names the pair.",
            show: Show::Table,
            unit: "short",
            size: (14, 9),
            queries: &[(
                "sum by (instance, role, verdict, confidence, owed_instance) (roomtrace_rooms_pinned{instance=~\"$instance\"}) > 0",
                "",
            )],
        },
        Panel {
            title: "Findings",
            about: "What is wrong with engines, one line for each cause.",
            show: Show::Table,
            unit: "short",
            size: (10, 9),
            queries: &[(
                "sum by (instance, class, confidence, role) (roomtrace_findings_open{instance=~\"$instance\"}) > 0",
                "",
            )],
        },
        Panel {
            title: "Pinned rooms by pair of hosts",
            about: "Whose move which host waits for. A pair that stays while others come and go is a bad link, or a bad host at one end of it.",
            show: Show::Stack,
            unit: "short",
            size: (24, 8),
            queries: &[(
                "sum by (instance, owed_instance) (roomtrace_rooms_pinned{instance=~\"$instance\"}) > 0",
                "{{instance}} waits for {{owed_instance}}",
            )],
        },
        Panel {
            title: "Pinned rooms",
            about: "By verdict and confidence.",
            show: Show::Stack,
            unit: "short",
            size: (12, 8),
            queries: &[(
                "sum by (verdict, confidence) (roomtrace_rooms_pinned{instance=~\"$instance\"})",
                "{{verdict}} {{confidence}}",
            )],
        },
        Panel {
            title: "Oldest open room",
            about: "By role and state.",
            show: Show::Lines,
            unit: "s",
            size: (12, 8),
            queries: &[(
                "max by (role, state) (roomtrace_oldest_open_room_age_seconds{instance=~\"$instance\"})",
                "{{role}} {{state}}",
            )],
        },
        Panel {
            title: "Transfer phase",
            about: "From METADATA to STATUS, both roles. A point is the trace of one room.",
            show: Show::Heat,
            unit: "s",
            size: (12, 9),
            queries: &[(
                "sum by (le) (rate(roomtrace_room_phase_duration_seconds_bucket{instance=~\"$instance\", phase=\"transfer\"}[$__rate_interval]))",
                "{{le}}",
            )],
        },
        Panel {
            title: "Rooms that ended",
            about: "Each second, by outcome.",
            show: Show::Stack,
            unit: "cps",
            size: (12, 9),
            queries: &[(
                "sum by (role, outcome) (rate(roomtrace_rooms_closed_total{instance=~\"$instance\"}[$__rate_interval]))",
                "{{role}} {{outcome}}",
            )],
        },
        Panel {
            title: "Lost",
            about: "Where it was lost, and why.",
            show: Show::Lines,
            unit: "cps",
            size: (12, 8),
            queries: &[(
                "sum by (stage, reason) (rate(roomtrace_capture_lost_total{instance=~\"$instance\"}[$__rate_interval])) > 0 or sum(rate(roomtrace_capture_lost_total{instance=~\"$instance\"}[$__rate_interval]))",
                "{{stage}} {{reason}}",
            )],
        },
        Panel {
            title: "Cost",
            about: "CPU of the agent, and of its programs in the kernel (sampled), per host.",
            show: Show::Lines,
            unit: "percentunit",
            size: (12, 8),
            queries: &[
                (
                    "max by (instance) (rate(process_cpu_seconds_total{instance=~\"$instance\"} [$__rate_interval]) and on (instance) roomtrace_build_info)",
                    "{{instance}} agent",
                ),
                (
                    "sum by (instance) (rate(roomtrace_bpf_run_seconds_total{instance=~\"$instance\"}[$__rate_interval]))",
                    "{{instance}} kernel",
                ),
            ],
        },
    ],
};

const HOST: Dashboard = Dashboard {
    uid: "roomtrace-host",
    title: "Roomtrace / Host",
    about: "One host: its rooms, messages, requests, connections, GPUs, and what the agent does there.",
    one_host: true,
    room: false,
    panels: &[
        Panel {
            title: "Open rooms",
            about: "By role and state.",
            show: Show::Stack,
            unit: "short",
            size: (12, 8),
            queries: &[(
                "sum by (role, state) (roomtrace_rooms_open{instance=\"$instance\"})",
                "{{role}} {{state}}",
            )],
        },
        Panel {
            title: "Pinned rooms",
            about: "By verdict and debtor.",
            show: Show::Stack,
            unit: "short",
            size: (12, 8),
            queries: &[(
                "sum by (verdict, confidence, owed_instance) (roomtrace_rooms_pinned{instance=\"$instance\"})",
                "{{verdict}} {{confidence}} {{owed_instance}}",
            )],
        },
        Panel {
            title: "Phases, half of the rooms",
            about: "Median of each phase.",
            show: Show::Lines,
            unit: "s",
            size: (12, 8),
            queries: &[(
                "histogram_quantile(0.5, sum by (le, role, phase) (rate(roomtrace_room_phase_duration_seconds_bucket{instance=\"$instance\"}[$__rate_interval])))",
                "{{role}} {{phase}}",
            )],
        },
        Panel {
            title: "Phases, 99 of 100 rooms",
            about: "A room is overdue at eight times this, at least 10 s.",
            show: Show::Lines,
            unit: "s",
            size: (12, 8),
            queries: &[(
                "histogram_quantile(0.99, sum by (le, role, phase) (rate(roomtrace_room_phase_duration_seconds_bucket{instance=\"$instance\"}[$__rate_interval])))",
                "{{role}} {{phase}}",
            )],
        },
        Panel {
            title: "Control messages",
            about: "Each second, by direction and kind.",
            show: Show::Lines,
            unit: "cps",
            size: (12, 8),
            queries: &[(
                "sum by (direction, kind) (rate(roomtrace_messages_total{instance=\"$instance\"}[$__rate_interval]))",
                "{{direction}} {{kind}}",
            )],
        },
        Panel {
            title: "Requests",
            about: "Each second, at the HTTP ports of engines and bootstrap servers.",
            show: Show::Lines,
            unit: "reqps",
            size: (12, 8),
            queries: &[(
                "sum by (route) (rate(roomtrace_requests_total{instance=\"$instance\"}[$__rate_interval]))",
                "{{route}}",
            )],
        },
        Panel {
            title: "Connections",
            about: "By what is known of them.",
            show: Show::Stack,
            unit: "short",
            size: (8, 8),
            queries: &[("sum by (state) (roomtrace_connections{instance=\"$instance\"})", "{{state}}")],
        },
        Panel {
            title: "Engine processes",
            about: "By role.",
            show: Show::Lines,
            unit: "short",
            size: (8, 8),
            queries: &[("sum by (role) (roomtrace_engine_processes{instance=\"$instance\"})", "{{role}}")],
        },
        Panel {
            title: "Not captured on purpose or for a reason",
            about: "Calls of which not all bytes are known; `middle` is left out on purpose.",
            show: Show::Lines,
            unit: "cps",
            size: (8, 8),
            queries: &[(
                "sum by (reason) (rate(roomtrace_not_captured_total{instance=\"$instance\"}[$__rate_interval]))",
                "{{reason}}",
            )],
        },
        Panel {
            title: "GPU copies",
            about: "Bytes of the whole GPU each second, by link and direction. Never of one room.",
            show: Show::Lines,
            unit: "Bps",
            size: (12, 8),
            queries: &[(
                "sum by (gpu, link, direction) (rate(roomtrace_gpu_copy_bytes_total{instance=\"$instance\"}[$__rate_interval]))",
                "{{gpu}} {{link}} {{direction}}",
            )],
        },
        Panel {
            title: "GPU driver",
            about: "Time in calls to the driver, and GPUs that cannot be read.",
            show: Show::Lines,
            unit: "short",
            size: (12, 8),
            queries: &[(
                "sum by (gpu, result) (rate(roomtrace_gpu_calls_total{instance=\"$instance\"}[$__rate_interval]))",
                "{{gpu}} {{result}}",
            )],
        },
        Panel {
            title: "Kernel programs",
            about: "Seconds of CPU each second (sampled).",
            show: Show::Stack,
            unit: "percentunit",
            size: (8, 8),
            queries: &[(
                "sum by (program) (rate(roomtrace_bpf_run_seconds_total{instance=\"$instance\"}[$__rate_interval]))",
                "{{program}}",
            )],
        },
        Panel {
            title: "Agent",
            about: "CPU of the agent.",
            show: Show::Lines,
            unit: "percentunit",
            size: (8, 8),
            queries: &[(
                "rate(process_cpu_seconds_total{instance=\"$instance\"}[$__rate_interval]) and on (instance) roomtrace_build_info",
                "CPU",
            )],
        },
        Panel {
            title: "Memory of the agent",
            about: "Resident.",
            show: Show::Lines,
            unit: "bytes",
            size: (8, 8),
            queries: &[(
                "process_resident_memory_bytes{instance=\"$instance\"} and on (instance) roomtrace_build_info",
                "resident",
            )],
        },
    ],
};

const ROOM: Dashboard = Dashboard {
    uid: "roomtrace-room",
    title: "Roomtrace / Room",
    about: "One room's path, from the store of traces. `roomtrace explain ROOM` on its host says the same with evidence and actions.",
    one_host: false,
    room: true,
    panels: &[Panel {
        title: "Pinned rooms by host",
        about: "Where to look. The room's number is in the agent's own API, in its events and in the traces.",
        show: Show::Table,
        unit: "short",
        size: (24, 6),
        queries: &[(
            "sum by (instance, role, verdict, confidence, owed_instance) (roomtrace_rooms_pinned{instance=~\"$instance\"}) > 0",
            "",
        )],
    }],
};
