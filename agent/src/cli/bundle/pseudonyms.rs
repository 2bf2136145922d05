//! Other names for what names a host, a container, a pod, a GPU or a request: the same one for the same name throughout, so that
//! what belongs together still does, and an address is still one, so that a recording can still be replayed. Pure.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::Value;

/// Keys whose values are names, with what they become.
const KEYS: [(&str, &str); 12] = [
    ("host", "host"),
    ("host_name", "host"),
    ("pod", "pod"),
    ("pod_uid", "pod"),
    ("namespace", "namespace"),
    ("container", "container"),
    ("container_name", "container"),
    ("rid", "rid"),
    ("rids", "rid"),
    ("session", "session"),
    ("uuid", "gpu"),
    ("gpu", "gpu"),
];

fn kind_of(key: &str) -> Option<&'static str> {
    KEYS.iter().find(|(k, _)| *k == key).map(|(_, kind)| *kind)
}

/// Shortest name that is replaced within a text, bytes.
const SHORTEST: usize = 4;

/// What host names, ids of containers, pods and most requests are made of.
const fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// Whether a word is the driver's name of a GPU or of a part of one, the same for as long as the card lives (`nvml.h`,
/// `nvmlDeviceGetUUID`: `GPU-`, `MIG-` or `MIG-GPU-` and a UUID).
fn is_gpu(word: &str) -> bool {
    let id = word.trim_start_matches("MIG-").trim_start_matches("GPU-");
    let dashed =
        |(n, c): (usize, char)| if matches!(n, 8 | 13 | 18 | 23) { c == '-' } else { c.is_ascii_hexdigit() };
    id.len() < word.len() && id.len() == 36 && id.chars().enumerate().all(dashed)
}

/// Whether it is a PCI address: domain, bus, device and function in hexadecimal (`0000:3b:00.0`; NVML writes eight digits of the domain).
fn is_pci(word: &str) -> bool {
    let hex = |text: &str, lengths: &[usize]| {
        lengths.contains(&text.len()) && text.chars().all(|c| c.is_ascii_hexdigit())
    };
    let mut parts = word.split([':', '.']);
    let four = [parts.next(), parts.next(), parts.next(), parts.next()];
    let [Some(domain), Some(bus), Some(device), Some(function)] = four else { return false };
    parts.next().is_none()
        && word.ends_with(&format!(":{device}.{function}"))
        && hex(domain, &[4, 8])
        && hex(bus, &[2])
        && hex(device, &[2])
        && hex(function, &[1])
}

/// What has been renamed so far.
#[derive(Debug, Default)]
pub(super) struct Pseudonyms {
    addresses: HashMap<IpAddr, IpAddr>,
    names: HashMap<String, String>,
    /// Those of them that are no single word, to be looked for one by one.
    odd: Vec<String>,
    counts: HashMap<&'static str, usize>,
}

impl Pseudonyms {
    /// The other name of `name`; from now on it is replaced in texts as well.
    pub(super) fn name(&mut self, name: &str, kind: &'static str) -> String {
        if name.is_empty() {
            return String::new();
        }
        // It says which of them and nothing about it.
        if kind == "gpu" && name.strip_prefix("index-").is_some_and(|n| n.parse::<u32>().is_ok()) {
            return name.to_owned();
        }
        // An address, or an address and a port, stays one.
        let renamed = self.addresses_in(name);
        if renamed != name || name.parse::<IpAddr>().is_ok() {
            return renamed;
        }
        let odd = name.len() >= SHORTEST && (!name.chars().all(is_word) || name.ends_with('.'));
        if odd && !self.names.contains_key(name) {
            self.odd.push(name.to_owned());
        }
        self.numbered(name, kind)
    }

    /// Renames everything in a value.
    pub(super) fn value(&mut self, value: &mut Value) {
        // Names first: sentences that hold them may stand before them.
        self.learn(value, None);
        self.replace(value, None);
    }

    fn learn(&mut self, value: &Value, kind: Option<&'static str>) {
        match (value, kind) {
            (Value::String(text), Some(kind)) => {
                self.name(text, kind);
            }
            (Value::String(text), None) => self.learn_from_command(text),
            (Value::Array(items), _) => items.iter().for_each(|item| self.learn(item, kind)),
            (Value::Object(fields), _) => {
                fields.iter().for_each(|(key, field)| self.learn(field, kind_of(key)));
            }
            _ => {}
        }
    }

    /// The request of a command that ends it (`{"rid":"…"}`), also where nothing else names it any more.
    fn learn_from_command(&mut self, text: &str) {
        for rest in text.split(r#""rid":""#).skip(1) {
            if let Some((rid, _)) = rest.split_once('"') {
                self.name(rid, "rid");
            }
        }
    }

    fn replace(&mut self, value: &mut Value, kind: Option<&'static str>) {
        match (value, kind) {
            (Value::String(text), Some(kind)) => *text = self.name(text, kind),
            (Value::String(text), None) => *text = self.text(text),
            (Value::Array(items), _) => items.iter_mut().for_each(|item| self.replace(item, kind)),
            (Value::Object(fields), _) => {
                fields.iter_mut().for_each(|(key, field)| self.replace(field, kind_of(key)));
            }
            _ => {}
        }
    }

    /// Renames in a text what is known by then, and every address.
    pub(super) fn text(&mut self, text: &str) -> String {
        let addressed = self.addresses_in(text);
        // Known by its form, wherever it stands first.
        for word in
            addressed.split(|c| !is_word(c)).map(|word| word.trim_end_matches('.')).filter(|w| is_gpu(w))
        {
            self.name(word, "gpu");
        }
        let mut out = self.words_in(&addressed);
        for name in &self.odd {
            if let Some(other) = self.names.get(name).filter(|_| out.contains(name.as_str())) {
                out = out.replace(name.as_str(), other);
            }
        }
        out
    }

    /// Renames every word that is a name: one look-up each, however many names there are.
    fn words_in(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(is_word) {
            let (before, from) = rest.split_at(start);
            out.push_str(before);
            let (word, behind) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
            let bare = word.trim_end_matches('.');
            // A short one is another word.
            let other = self.names.get(bare).filter(|_| bare.len() >= SHORTEST);
            out.push_str(other.map_or(bare, String::as_str));
            out.push_str(word.get(bare.len()..).unwrap_or_default());
            rest = behind;
        }
        out.push_str(rest);
        out
    }

    fn addresses_in(&mut self, text: &str) -> String {
        let part = |c: char| c.is_ascii_hexdigit() || c == '.' || c == ':';
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(part) {
            let (before, from) = rest.split_at(start);
            out.push_str(before);
            let end = from.find(|c| !part(c)).unwrap_or(from.len());
            let (word, behind) = from.split_at(end);
            out.push_str(&self.address(word));
            rest = behind;
        }
        out.push_str(rest);
        out
    }

    /// `word` is made of what addresses are made of.
    fn address(&mut self, word: &str) -> String {
        let bare = word.trim_end_matches(['.', ':']);
        let tail = word.get(bare.len()..).unwrap_or_default();
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return format!("{}{tail}", self.other(ip));
        }
        // 10.0.0.1:8998; of IPv6 the brackets part the two.
        if let Some((ip, port)) = bare.rsplit_once(':')
            && let Ok(ip) = ip.parse::<Ipv4Addr>()
        {
            return format!("{}:{port}{tail}", self.other(ip.into()));
        }
        if is_pci(bare) {
            return format!("{}{tail}", self.numbered(bare, "pci"));
        }
        word.to_owned()
    }

    /// The other name of `name`, which is one of its kind and a number.
    fn numbered(&mut self, name: &str, kind: &'static str) -> String {
        if let Some(known) = self.names.get(name) {
            return known.clone();
        }
        let n = self.counts.entry(kind).or_insert(0);
        *n += 1;
        let other = format!("{kind}-{n}");
        self.names.insert(name.to_owned(), other.clone());
        other
    }

    /// Another address of the same family, of the ranges for documentation and tests (RFC 2544, RFC 3849). What every host
    /// has, loopback and none, stays.
    fn other(&mut self, ip: IpAddr) -> IpAddr {
        if ip.is_loopback() || ip.is_unspecified() {
            return ip;
        }
        let n = self.addresses.len();
        *self.addresses.entry(ip).or_insert_with(|| {
            let n = u32::try_from(n).unwrap_or(u32::MAX).saturating_add(1);
            match ip {
                IpAddr::V4(_) => Ipv4Addr::from(0xc612_0000_u32.wrapping_add(n & 0x1_ffff)).into(),
                IpAddr::V6(_) => {
                    Ipv6Addr::from(0x2001_0db8_0000_0000_0000_0000_0000_0000_u128 + u128::from(n)).into()
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn a_request_is_known_from_the_command_that_ends_it() {
        let mut names = Pseudonyms::default();
        let mut finding = json!({
            "evidence": ["decode aborted the request cust-4711-abc"],
            "actions": [{"command": r#"curl -d '{"rid":"cust-4711-abc"}' http://127.0.0.1:30000/abort_request"#}],
        });
        names.value(&mut finding);
        assert!(!finding.to_string().contains("cust-4711"), "{finding}");
        assert_eq!(finding["evidence"][0], "decode aborted the request rid-1");
    }

    #[test]
    fn addresses_stay_addresses_and_the_same_ones_the_same() {
        let mut names = Pseudonyms::default();
        let text = "connect to 10.1.2.3:4000 (10.1.2.3) and [fd00::7]:80, not 127.0.0.1:8998.";
        let other = "connect to 198.18.0.1:4000 (198.18.0.1) and [2001:db8::2]:80, not 127.0.0.1:8998.";
        assert_eq!(names.text(text), other);
    }

    #[test]
    fn names_are_replaced_where_they_stand_and_in_sentences() {
        let mut names = Pseudonyms::default();
        let mut value = json!({
            "evidence": ["request of client-77 at node-a.example"], "room": "5123456789012345678",
            "request": {"rid": "client-77"}, "host": "node-a.example", "time": "2026-11-30T03:11:11Z",
            "session": "10.0.0.9:15000",
        });
        names.value(&mut value);
        let text = value.to_string();
        assert!(
            !text.contains("client-77") && !text.contains("node-a") && !text.contains("10.0.0.9"),
            "{text}"
        );
        assert_eq!(value["evidence"][0], "request of rid-1 at host-1");
        assert!(text.contains("5123456789012345678") && text.contains("2026-11-30T03:11:11Z"), "{text}");
    }

    #[test]
    fn names_of_several_words_and_names_at_the_end_of_a_sentence_are_found() {
        let mut names = Pseudonyms::default();
        names.name("tenant a/7", "rid");
        names.name("node-b", "host");
        assert_eq!(names.text("(tenant a/7) came to node-b."), "(rid-1) came to host-1.");
        assert_eq!(
            names.text("node-bb is another, /var/node-b/x is not"),
            "node-bb is another, /var/host-1/x is not"
        );
    }

    #[test]
    fn gpus_are_renamed_wherever_their_names_stand() {
        let mut names = Pseudonyms::default();
        let id = "1d2c3b4a-0123-4567-89ab-cdef01234567";
        let mut value = json!({
            "gpu": [{"uuid": format!("GPU-{id}"), "link": "pcie", "troubles": []}],
            "gpus": [{"index": 0, "gpu": "index-0"}, {"index": 1, "gpu": "GPU-5e"}],
            "evidence": [format!("GPU-{id} was idle."), "0000:3B:00.0 fell off the bus, as 00000000:AF:00.1 did"],
            "what": {"named": format!("MIG-{id}")},
        });
        names.value(&mut value);
        let text = value.to_string();
        assert!(!text.contains("1d2c3b4a") && !text.contains("3B:00") && !text.contains("AF:00"), "{text}");
        let name = value["gpu"][0]["uuid"].as_str().unwrap_or_default().to_owned();
        assert!(name.starts_with("gpu-"), "{text}");
        assert_eq!(value["evidence"][0], format!("{name} was idle."));
        assert_eq!(value["evidence"][1], "pci-1 fell off the bus, as pci-2 did");
        assert_eq!(value["gpus"][0]["gpu"], "index-0", "it names no card");
        // In a text that comes first as well, such as metrics.
        let metric = format!("roomtrace_gpu_copy_bytes_total{{gpu=\"GPU-{id}\",link=\"pcie\"}} 7");
        let mut names = Pseudonyms::default();
        assert_eq!(names.text(&metric), "roomtrace_gpu_copy_bytes_total{gpu=\"gpu-1\",link=\"pcie\"} 7");
        // Times, versions and ports are none.
        for other in [
            "12:34:56.7",
            "2026-11-30T03:11:11.123Z",
            "1.2.3",
            "GPU-",
            "MIG-GPU-x",
            "0000:3b:00.12",
            "0000.3b.00.0",
        ] {
            assert_eq!(names.text(other), other);
        }
    }

    proptest! {
        #[test]
        fn any_text_keeps_what_is_no_address(text in "[^0-9a-fA-F.:]{0,60}") {
            prop_assert_eq!(Pseudonyms::default().text(&text), text);
        }

        #[test]
        fn no_text_makes_it_panic(text in any::<String>()) {
            let _ = Pseudonyms::default().text(&text);
        }
    }
}
