//! What the engines' schedulers said of a room, as JSON: `scheduler` of the record.
//!
//! Pure.

use serde::Serialize;

use super::clock::Clock;
use crate::rooms::model::Role;
use crate::spans::EngineRequest;

/// `trace_id` and `rid` are those of the first request.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SchedulerJson {
    trace_id: String,
    rid: String,
    requests: Vec<RequestJson>,
    stages: Vec<StageJson>,
}

#[derive(Clone, Debug, Serialize)]
struct RequestJson {
    role: Option<&'static str>,
    rid: String,
    trace_id: String,
    span_id: String,
    /// `None`: not believed.
    begun: Option<String>,
    ended: Option<String>,
    failed: bool,
    /// Spans whose times cannot be of this room: they are not among the stages, and nothing rests on this request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    times_not_believed: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct StageJson {
    stage: String,
    role: Option<&'static str>,
    begun: String,
    ended: String,
    /// Spans of this name, of all ranks.
    spans: u32,
}

/// `None` where nothing came: not measured.
pub(super) fn scheduler(requests: &[EngineRequest], clock: &Clock) -> Option<SchedulerJson> {
    let first = requests.first()?;
    let stages = requests.iter().flat_map(|r| r.stages.iter().map(move |s| (r.role, s)));
    let mut stages: Vec<_> = stages.collect();
    stages.sort_by_key(|(role, s)| (s.begin, s.end, *role));
    Some(SchedulerJson {
        trace_id: first.trace.to_string(),
        rid: first.rid.to_string(),
        requests: requests
            .iter()
            .map(|r| RequestJson {
                role: r.role.map(Role::label),
                rid: r.rid.to_string(),
                trace_id: r.trace.to_string(),
                span_id: r.span.to_string(),
                begun: (!r.untimed).then(|| clock.rfc3339(r.begin)),
                ended: (!r.untimed).then(|| clock.rfc3339(r.end)),
                failed: r.failed,
                times_not_believed: r.doubted.iter().map(ToString::to_string).collect(),
            })
            .collect(),
        stages: stages
            .into_iter()
            .map(|(role, s)| StageJson {
                stage: s.name.to_string(),
                role: role.map(Role::label),
                begun: clock.rfc3339(s.begin),
                ended: clock.rfc3339(s.end),
                spans: s.spans,
            })
            .collect(),
    })
}
