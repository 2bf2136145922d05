//! Which of the agent's events are about the processes under test: the agent sees the whole host, and other engines may run on
//! it. Pure: JSON lines in, JSON lines out.
//!
//! An event is another engine's if its room is none of the known ones and it names endpoints of which none is ours. A room
//! that nobody made, at a port of ours, is therefore ours and counts as wrong.

use std::collections::HashSet;

use anyhow::{Context, Result};
use serde_json::Value;

/// What belongs to the processes under test.
#[derive(Debug, Default)]
pub(crate) struct Own {
    rooms: HashSet<String>,
    /// Ports that they listen on; none known: nobody else was there (a recording of them alone).
    ports: HashSet<u64>,
}

impl Own {
    /// Of processes that listen on these ports.
    pub(crate) fn at(ports: impl IntoIterator<Item = u64>) -> Self {
        Self { rooms: HashSet::new(), ports: ports.into_iter().collect() }
    }

    /// From the workload's truth file: its rooms, and the ports that it names anywhere.
    pub(crate) fn of_truth(truth: &str) -> Result<Self> {
        let mut own = Self::default();
        for line in lines(truth) {
            let line = line.context("the truth file")?;
            if line["kind"] == "room" {
                own.rooms.insert(line["room"].to_string());
            }
            for ports in [&line["rank_ports"], &line["http_ports"]] {
                own.ports.extend(ports.as_array().into_iter().flatten().filter_map(Value::as_u64));
            }
        }
        Ok(own)
    }

    /// Whether it is a room that they made.
    pub(crate) fn has(&self, room: &str) -> bool {
        self.rooms.contains(room)
    }

    /// Whether the processes under test made the room, or the event is about an endpoint of theirs.
    pub(crate) fn is(&self, event: &Value) -> bool {
        if self.ports.is_empty() || event["room"].as_str().is_some_and(|room| self.has(room)) {
            return true;
        }
        let mut named = Vec::new();
        endpoint_ports(&event["views"], &mut named);
        if named.is_empty() {
            // A room of which only requests are known: the commands name the engine's HTTP port.
            let commands = event["verdict"]["actions"].as_array().into_iter().flatten();
            named.extend(commands.filter_map(|a| url_port(a["command"].as_str()?)));
        }
        named.is_empty() || named.iter().any(|port| self.ports.contains(port))
    }

    /// The events that are ours, and how many are not.
    pub(crate) fn events(&self, events: &str) -> Result<(String, usize)> {
        let (mut own, mut others) = (String::new(), 0);
        for event in lines(events) {
            let event = event.context("the agent's events")?;
            if self.is(&event) {
                own.push_str(&event.to_string());
                own.push('\n');
            } else {
                others += 1;
            }
        }
        Ok((own, others))
    }
}

/// The lines of a JSON lines text.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = Result<Value>> + '_ {
    let numbered = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    numbered.map(|(n, line)| serde_json::from_str(line).with_context(|| format!("line {}: not JSON", n + 1)))
}

/// The port of the first URL in a command.
fn url_port(command: &str) -> Option<u64> {
    let (_, url) = command.split_once("http://")?;
    let (address, _) = url.split_once('/')?;
    address.rsplit(':').next()?.parse().ok()
}

/// The ports of every endpoint and peer named in a value.
fn endpoint_ports(value: &Value, ports: &mut Vec<u64>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field.as_str().filter(|_| name == "endpoint" || name == "peer") {
                    Some(address) => {
                        ports.extend(address.rsplit(':').next().and_then(|p| p.parse::<u64>().ok()));
                    }
                    None => endpoint_ports(field, ports),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| endpoint_ports(item, ports)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    /// Room numbers are above 2^53.
    const TRUTH: &str = r#"{"kind":"ready","rank_ports":[4001,4002]}
{"kind":"room","room":11111111111111111111,"scenario":"healthy"}
"#;

    fn event(room: &str, peer: &str) -> String {
        let messages = if peer.is_empty() { String::new() } else { format!(r#"{{"peer":"{peer}"}}"#) };
        format!(r#"{{"room":"{room}","views":{{"prefill":{{"messages":[{messages}]}},"decode":null}}}}"#)
    }

    #[test]
    fn events_of_other_engines_are_left_out_and_counted() {
        let own = Own::of_truth(TRUTH).unwrap();
        let ours = [event("11111111111111111111", "127.0.0.1:9"), event("7", "[::1]:4002"), event("8", "")];
        let events = [&ours[..], &[event("12", "127.0.0.1:5001")]].concat().join("\n");
        let (kept, others) = own.events(&events).unwrap();
        let rooms: Vec<String> =
            lines(&kept).map(|e| e.unwrap()["room"].as_str().unwrap().to_owned()).collect();
        assert_eq!(
            rooms,
            ["11111111111111111111", "7", "8"],
            "a room that nobody made, at our port, is ours"
        );
        assert_eq!(others, 1);
    }

    #[test]
    fn a_recording_holds_nobody_else() {
        let own = Own::of_truth(r#"{"kind":"room","room":1}"#).unwrap();
        assert_eq!(own.events(&event("12", "127.0.0.1:5001")).unwrap().1, 0);
    }
}
