//! Resources: one for the agent itself, one per engine process it speaks of.
//!
//! Reads `/proc/PID/cgroup` of live processes for their container, nothing else.

use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::Resource;

use super::settings::{Env, pairs};
use crate::event::{Comm, Task};
use crate::export::Identity;

/// Version of the semantic conventions whose names are used.
const SCHEMA: &str = "https://opentelemetry.io/schemas/1.44.0";

/// `service.name` of the engine's processes: what `SGLang` calls itself in its own spans
/// (`srt/observability/trace.py`).
const ENGINE: &str = "sglang";

/// Names an engine process; the name and cgroup tell apart two that had the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProcessKey {
    pid: u32,
    comm: Comm,
    cgroup: u64,
}

impl From<Task> for ProcessKey {
    fn from(task: Task) -> Self {
        Self { pid: task.tgid, comm: task.comm, cgroup: task.cgroup }
    }
}

/// Makes resources.
#[derive(Clone, Debug)]
pub(super) struct Resources {
    /// What the operator says of everything here (`OTEL_RESOURCE_ATTRIBUTES` without `service.*`), and the host.
    common: Vec<KeyValue>,
    agent: Resource,
    live: bool,
    host_id: String,
}

impl Resources {
    pub(super) fn new(identity: &Identity, env: Env<'_>) -> Self {
        let given = env("OTEL_RESOURCE_ATTRIBUTES").map(|l| pairs(&l)).unwrap_or_default();
        let (service, mut common): (Vec<_>, Vec<_>) = given
            .into_iter()
            .map(|(k, v)| KeyValue::new(k, v))
            .partition(|kv| kv.key.as_str().starts_with("service."));
        let mut default = |key: &'static str, value: &str| {
            if common.iter().all(|kv| kv.key.as_str() != key) {
                common.push(KeyValue::new(key, value.to_owned()));
            }
        };
        default("host.id", &identity.host_id);
        default("host.name", &identity.host_name);
        let name = env("OTEL_SERVICE_NAME").filter(|n| !n.is_empty());
        let mut agent = common.clone();
        agent.push(KeyValue::new("service.name", "roomtrace"));
        agent.push(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        agent.push(KeyValue::new("service.instance.id", identity.host_id.clone()));
        agent.extend(service);
        agent.extend(name.map(|n| KeyValue::new("service.name", n)));
        let agent = resource(agent);
        Self { common, agent, live: identity.live, host_id: identity.host_id.clone() }
    }

    /// The agent's own.
    pub(super) const fn agent(&self) -> &Resource {
        &self.agent
    }

    /// Of an engine process, of the agent where the process is not known.
    pub(super) fn of(&self, process: Option<ProcessKey>) -> Resource {
        let Some(process) = process else { return self.agent.clone() };
        let mut all = self.common.clone();
        all.push(KeyValue::new("service.name", ENGINE));
        all.push(KeyValue::new("service.instance.id", format!("{}:{}", self.host_id, process.pid)));
        all.push(KeyValue::new("process.pid", Value::I64(process.pid.into())));
        all.push(KeyValue::new("process.title", process.comm.to_text()));
        let container = self.live.then(|| container_of(process.pid)).flatten();
        all.extend(container.map(|id| KeyValue::new("container.id", id)));
        resource(all)
    }
}

fn resource(attributes: Vec<KeyValue>) -> Resource {
    Resource::builder_empty().with_schema_url(attributes, SCHEMA).build()
}

fn container_of(pid: u32) -> Option<String> {
    container_id(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// The last run of 64 hexadecimal digits in a cgroup path, as every container runtime names its groups.
fn container_id(cgroups: &str) -> Option<String> {
    let mut words = cgroups.split(|c: char| !c.is_ascii_hexdigit());
    words.rfind(|w| w.len() == 64).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::testing::{identity, task};
    use opentelemetry::Key;

    fn text(r: &Resource, key: &'static str) -> Option<String> {
        r.get(&Key::from_static_str(key)).map(|v| v.to_string())
    }

    #[test]
    fn the_agents_service_name_comes_from_the_environment_and_the_engines_does_not() {
        let env = |name: &str| match name {
            "OTEL_RESOURCE_ATTRIBUTES" => {
                Some("deployment.environment.name=prod%2Ca,service.name=x".to_owned())
            }
            "OTEL_SERVICE_NAME" => Some("mine".to_owned()),
            _ => None,
        };
        let resources = Resources::new(&identity(), &env);
        let engine = resources.of(Some(task(42).into()));
        assert_eq!(text(resources.agent(), "service.name").as_deref(), Some("mine"));
        assert_eq!(text(&engine, "service.name").as_deref(), Some("sglang"));
        assert_eq!(text(&engine, "process.pid").as_deref(), Some("42"));
        assert_eq!(text(&engine, "container.id"), None);
        for r in [resources.agent(), &engine] {
            assert_eq!(text(r, "deployment.environment.name").as_deref(), Some("prod,a"));
            assert_eq!(text(r, "host.id").as_deref(), Some("id-a"));
        }
    }

    #[test]
    fn container_ids_are_found_in_the_paths_of_every_runtime() {
        let id = "0123456789abcdef".repeat(4);
        for path in [
            format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope\n"),
            format!("0::/docker/{id}\n"),
            format!("12:cpu:/kubepods/burstable/pod12/{id}\n0::/\n"),
        ] {
            assert_eq!(container_id(&path).as_deref(), Some(id.as_str()));
        }
        assert_eq!(container_id("0::/user.slice/user-0.slice\n"), None);
    }
}
