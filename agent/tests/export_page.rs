//! The pages: what stands on them, that they say what the API and `explain` say, and that no string of a stranger gets out of its place.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine as _;
use roomtrace::{event, export, rooms, sglang, verdict};
use sha2::Digest as _;

mod export_pipeline;
mod rooms_support;
#[path = "../src/export/testing.rs"]
mod testing;

use event::{Comm, Mono, SECOND};
use export::Exports;
use export_pipeline::{Known, Pipeline};
use rooms::model::{GpuWindow, LegView, NetworkWindow, Place, RequestView, Role, RoomBatches, RoomSnapshot};
use roomtrace::gpu::windows::{Link, Source, Stretch, Window};
use testing::{ask, closed, finding, full_snapshot, get, identity, pinned, room, view};
use verdict::model::{Confidence, Finding, Verdict};

async fn started() -> (Exports, SocketAddr) {
    export_pipeline::started(identity()).await
}

/// Ready, and something is measured.
fn observing(exports: &mut Exports) {
    exports.set_ready(Ok(()));
    exports.publish(full_snapshot());
}

/// Asks again where the pipeline was too busy, as the thread that stands for it is on a busy machine.
async fn page(at: SocketAddr, path: &str) -> (u16, String, String) {
    for _ in 0..30 {
        let (status, head, body) = get(at, path, "").await;
        if status != 503 {
            return (status, head, body);
        }
    }
    get(at, path, "").await
}

async fn body(at: SocketAddr, path: &str) -> String {
    let (status, _, body) = page(at, path).await;
    assert_eq!(status, 200, "{path}: {body}");
    strict(&body);
    body
}

fn with(number: u64, confidence: Confidence) -> RoomSnapshot {
    let mut r = pinned(number);
    let group = number;
    r.verdict = Some(Box::new(Verdict { confidence, group, ..*r.verdict.unwrap() }));
    r
}

fn cause(number: u64, confidence: Confidence) -> Finding {
    Finding { group: number, rooms: vec![number], room_count: 1, confidence, ..finding() }
}

// Strangers' strings.

/// Elements and attributes that the pages are made of.
const ELEMENTS: &[&str] = &[
    "!DOCTYPE", "a", "article", "body", "circle", "code", "dd", "defs", "details", "div", "dl", "dt",
    "footer", "g", "h1", "h2", "h3", "head", "header", "html", "li", "line", "main", "meta", "p", "pattern",
    "rect", "section", "span", "style", "summary", "svg", "text", "title", "tspan", "ul",
];
const ATTRIBUTES: &[&str] = &[
    "aria-label",
    "charset",
    "class",
    "content",
    "cx",
    "cy",
    "height",
    "href",
    "http-equiv",
    "id",
    "lang",
    "name",
    "patternTransform",
    "patternUnits",
    "r",
    "role",
    "text-anchor",
    "transform",
    "width",
    "x",
    "x1",
    "x2",
    "y",
    "y1",
    "y2",
];

/// Reads a page as strictly as it is written, and fails at an element, attribute or link that no page has, and at a character that
/// hides.
fn strict(page: &str) {
    let hides = |c: char| {
        c.is_control() && c != '\n'
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    assert!(!page.contains(hides), "{:?}", page.find(hides).map(|i| &page[i.saturating_sub(40)..]));
    let mut open: Vec<&str> = Vec::new();
    for part in page.split('<').skip(1) {
        let (tag, _) = part.split_once('>').unwrap_or_else(|| panic!("no end: {part}"));
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
            continue;
        }
        let (name, mut attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        assert!(ELEMENTS.contains(&name), "<{tag}>");
        if !["meta", "!DOCTYPE"].contains(&name) {
            open.push(name);
        }
        while let Some((attribute, rest)) = attributes.split_once("=\"") {
            assert!(ATTRIBUTES.contains(&attribute.trim_start()), "<{tag}>");
            let (value, rest) = rest.split_once('"').unwrap_or_else(|| panic!("<{tag}>"));
            let local = value.starts_with('/') && !value.starts_with("//");
            assert!(attribute.trim_start() != "href" || local, "<{tag}>");
            attributes = rest;
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

const EVIL: &str = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>\u{1b}[2J\u{0}\u{7}\u{202e}gpj.exe\u{200b}&amp;]]>";

fn evil() -> String {
    EVIL.repeat(90)
}

fn comm(text: &[u8]) -> Comm {
    let mut comm = [0; 16];
    comm.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
    Comm(comm)
}

/// A pinned room of which every string that a stranger can choose is hostile.
fn hostile(number: u64) -> RoomSnapshot {
    let text = || evil().into_boxed_str();
    let mut r = everything(number);
    let mut verdict = *r.verdict.take().unwrap();
    for party in [&mut verdict.owed_by, &mut verdict.act_on] {
        let party = party.as_mut().unwrap();
        party.rank_names = Some(evil().into());
        party.place = Some(Arc::new(Place { container: Some(evil()), pod_uid: Some(evil()), name: None }));
        party.task.as_mut().unwrap().comm = comm(b"<script>x\x1b[\xff</");
    }
    verdict.evidence = vec![evil()];
    verdict.actions[0].command = evil();
    verdict.actions[0].effect = evil();
    verdict.actions[0].blast_radius = evil();
    r.verdict = Some(Box::new(verdict));
    for view in [&mut r.prefill, &mut r.decode] {
        let view = view.as_mut().unwrap();
        view.sessions[0] = evil().into();
        view.ranks[0].session = Some(evil().into());
        view.ranks[0].task.as_mut().unwrap().comm = comm(b"\"onload=\"alert(1)");
    }
    r.request.as_mut().unwrap().rid = Some(text());
    r.scheduled[0].rid = text();
    r.scheduled[0].stages[0].name = text();
    r.gpus[0].gpu = evil().into();
    r.network[0].name = evil().into();
    r
}

/// A pinned room with something of every source.
fn everything(number: u64) -> RoomSnapshot {
    let at = |s: u64| Mono(s * SECOND);
    let mut r = pinned(number);
    r.decode = Some(view(Role::Decode));
    let leg =
        LegView { begun: at(1), first_byte: Some(at(2)), ended: None, status: None, out_of_sight: false };
    r.request = Some(RequestView {
        rid: Some("rid-7".into()),
        prefill: Some(leg),
        decode: Some(LegView { out_of_sight: true, ..leg }),
        unplaced: None,
        unplaced_too: None,
    });
    let stage = roomtrace::spans::Stage {
        name: "prefill_forward".into(),
        begin: at(2),
        end: at(4),
        spans: 1,
        held: false,
    };
    r.scheduled = vec![roomtrace::spans::EngineRequest {
        role: Some(Role::Prefill),
        rid: "rid-7".into(),
        trace: roomtrace::spans::TraceId([7; 16]),
        span: roomtrace::spans::SpanId([7; 8]),
        begin: at(1),
        end: at(5),
        failed: false,
        stages: vec![stage],
        untimed: false,
        doubted: Vec::new(),
    }];
    let stretch =
        |link| Stretch { link, source: Source::Counters, from: at(1), to: at(9), out: 1 << 30, into: 0 };
    let window = |link| Window {
        link,
        source: Source::Counters,
        from: at(1),
        to: at(9),
        out: 1 << 30,
        into: 0,
        coverage: 950,
    };
    let gpu = GpuWindow {
        gpu: "GPU-a".into(),
        role: Role::Prefill,
        pid: 4711,
        from: at(2),
        to: at(8),
        links: [window(Link::Pcie)].into_iter().collect(),
        computing: None,
        overlapping: Some(3),
        troubles: vec![roomtrace::gpu::model::Trouble {
            from: at(5),
            to: None,
            what: roomtrace::gpu::model::Ailment::Xid(79),
        }],
        series: vec![stretch(Link::Pcie)],
    };
    let unread = GpuWindow {
        gpu: "GPU-b".into(),
        links: std::iter::empty().collect(),
        troubles: Vec::new(),
        series: Vec::new(),
        ..gpu.clone()
    };
    r.gpus = vec![gpu, unread];
    r.network = vec![NetworkWindow {
        name: "mlx5_0/1".into(),
        link: Link::Rdma,
        role: Role::Decode,
        pid: None,
        from: at(2),
        to: at(8),
        moved: Some(window(Link::Rdma)),
        overlapping: None,
        faults: Vec::new(),
        series: Vec::new(),
    }];
    r.batches =
        vec![RoomBatches { pid: 4711, bytes: 4096, whole: true, batches: 2, ..RoomBatches::default() }];
    r
}

#[tokio::test]
async fn a_strangers_string_stays_text_wherever_it_stands() {
    let mut identity = identity();
    identity.host_name = evil();
    let (mut exports, at) = export_pipeline::started(identity).await;
    let mut snapshot = full_snapshot();
    snapshot.rooms_pinned[0].owed_instance = evil();
    exports.set_ready(Ok(()));
    exports.publish(snapshot);
    let mut cause = cause(7, Confidence::Certain);
    cause.engine = hostile(7).verdict.unwrap().owed_by.unwrap();
    cause.evidence = vec![evil()];
    cause.actions[0].command = evil();
    let mut open = hostile(8);
    open.verdict = None;
    let alone = RoomSnapshot { room: 9, ..hostile(9) };
    let known = Known { rooms: vec![hostile(7), open, alone], findings: vec![cause], closed: Vec::new() };
    let pipeline = Pipeline::start(exports, known);
    for path in ["/", "/rooms/7", "/rooms/8"] {
        let page = body(at, path).await;
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{path}: it is shown, as text");
        assert!(
            page.contains("\\u{202e}gpj.exe\\u{200b}&amp;amp;") && page.contains("\\u{1b}[2J\\u{0}\\u{7}"),
            "{path}"
        );
        assert!(page.contains("more characters)") && page.len() < 400_000, "{path}: {} bytes", page.len());
    }
    pipeline.stop();
}

#[tokio::test]
async fn what_is_asked_for_is_named_and_stays_text() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, Known::default());
    let script = "/rooms/%3Cscript%3Ealert(1)%3C%2Fscript%3E%22%E2%80%AE";
    let long = format!("/rooms/{}", "9".repeat(5000));
    for (path, status, says) in [
        (
            script,
            400,
            "“&lt;script&gt;alert(1)&lt;/script&gt;&quot;\\u{202e}”: a room is a number from 0 to 18446744073709551615",
        ),
        ("/rooms/-1", 400, "“-1”: a room is a number"),
        ("/rooms/%ff", 400, "a room is a number"),
        ("/rooms/18446744073709551616", 400, "a room is a number"),
        (&long, 400, "more characters)"),
        ("/rooms/5?incarnation=x", 400, "incarnation"),
        ("/rooms/5?%3Cscript%3E=1", 400, "&lt;script&gt;"),
        ("/rooms/18446744073709551615", 404, "room 18446744073709551615 is not known here"),
    ] {
        let (got, head, body) = page(at, path).await;
        assert_eq!(got, status, "{path}: {body}");
        assert!(body.contains(says) && head.contains("text/html"), "{path}: {body}");
        strict(&body);
    }
    let post = ask(at, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
    assert_eq!(post.0, 405);
    pipeline.stop();
}

#[tokio::test]
async fn nothing_is_loaded_or_run_and_the_policy_has_the_hash_of_the_sheet() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, Known { rooms: vec![everything(7)], ..Known::default() });
    for path in ["/", "/rooms/7", "/rooms/x"] {
        let (_, head, body) = page(at, path).await;
        let policy = head.lines().find_map(|l| l.strip_prefix("content-security-policy: ")).unwrap();
        let (_, sheet) = body.split_once("<style>").unwrap();
        let (sheet, _) = sheet.split_once("</style>").unwrap();
        let hash = base64::engine::general_purpose::STANDARD.encode(sha2::Sha256::digest(sheet));
        assert!(policy.starts_with(&format!("default-src 'none'; style-src 'sha256-{hash}';")), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
        for header in
            ["cache-control: no-store", "x-content-type-options: nosniff", "referrer-policy: no-referrer"]
        {
            assert!(head.contains(header), "{header}: {head}");
        }
        assert!(!sheet.contains("url(h") && !sheet.contains("@import"));
        assert_eq!(body.contains("http-equiv=\"refresh\""), path == "/", "a page that is read does not move");
    }
    pipeline.stop();
}

// What stands on the pages.

#[tokio::test]
async fn without_anything_measured_no_room_is_called_healthy() {
    let (mut exports, at) = started().await;
    let told = |body: &str| {
        assert!(body.contains("This agent cannot tell") && !body.contains("No room is"), "{body}");
    };
    exports.set_ready(Err("no kernel hook could be attached".to_owned()));
    let pipeline = Pipeline::start(exports, Known::default());
    let page = body(at, "/").await;
    told(&page);
    assert!(page.contains("no kernel hook could be attached") && page.contains("not measured yet"), "{page}");
    exports = pipeline.stop();
    exports.set_ready(Ok(()));
    let pipeline = Pipeline::start(exports, Known::default());
    told(&body(at, "/").await);
    exports = pipeline.stop();
    let nobody = export::metrics::MetricsSnapshot { engine_processes: Vec::new(), ..full_snapshot() };
    exports.publish(nobody);
    let pipeline = Pipeline::start(exports, Known::default());
    let page = body(at, "/").await;
    told(&page);
    assert!(page.contains("No engine process was seen") && page.contains("roomtrace doctor"), "{page}");
    exports = pipeline.stop();
    observing(&mut exports);
    let pipeline = Pipeline::start(exports, Known::default());
    let page = body(at, "/").await;
    assert!(
        page.contains("<h1>No room is pinned</h1>")
            && page.contains("Engine processes seen: 0 prefill, 8 decode, 1 of unknown role"),
        "{page}"
    );
    pipeline.stop();
}

#[tokio::test]
async fn loss_and_cost_are_told_and_what_is_not_measured_is_not_zero() {
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let pipeline = Pipeline::start(exports, Known::default());
    let page = body(at, "/").await;
    for row in [
        "<dt>lost at ring: full</dt><dd>7</dd>",
        "<dt>connections not read: tls</dt><dd>3</dd>",
        "<dt>findings not opened: table full</dt><dd>6</dd>",
        "<dt>lost in the kernel</dt><dd>not measured</dd>",
        "<dt>in its kernel programs</dt><dd>1.50 s",
    ] {
        assert!(page.contains(row), "{row}: {page}");
    }
    let mut exports = pipeline.stop();
    exports.publish(export::metrics::MetricsSnapshot { bpf_run_nanos: Vec::new(), ..full_snapshot() });
    let pipeline = Pipeline::start(exports, Known::default());
    assert!(body(at, "/").await.contains("<dt>in its kernel programs</dt><dd>not measured</dd>"));
    pipeline.stop();
}

/// What stands before and from the heading of what is only possible.
fn halves(page: &str) -> (&str, &str) {
    page.split_at(page.find("Possible: only silence says so").unwrap())
}

#[tokio::test]
async fn what_is_only_possible_stands_apart_looks_different_and_raises_no_alarm() {
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let findings =
        vec![cause(5, Confidence::Possible), cause(6, Confidence::Certain), cause(9, Confidence::Likely)];
    let rooms =
        vec![with(5, Confidence::Possible), with(6, Confidence::Certain), with(9, Confidence::Likely)];
    let pipeline = Pipeline::start(exports, Known { rooms, findings, closed: Vec::new() });
    let page = body(at, "/").await;
    assert!(
        page.contains("<h1>2 rooms are pinned</h1>")
            && page.contains("1 room silent for long (possible): watch, do not page.")
    );
    assert!(page.contains("<title>PINNED 2 "));
    let (sure, possible) = halves(&page);
    let places = ["/rooms/6", "/rooms/9"].map(|room| sure.find(&format!("href=\"{room}\"")).unwrap());
    assert!(places[0] < places[1] && !sure.contains("href=\"/rooms/5\""), "surest first");
    assert!(
        possible.contains("href=\"/rooms/5\"")
            && !possible.contains("class=\"card sure\"")
            && !possible.contains("badge sure")
    );
    assert!(sure.matches("class=\"card sure\"").count() == 2 && !sure.contains("card silent"));
    assert!(
        sure.contains("restart the engine") && !possible.contains("restart the engine"),
        "nobody acts on silence at once"
    );
    assert!(
        possible.contains("Make sure first: whether the worker thread lives")
            && possible.contains("1 room may hang on it")
    );
    // Its own page.
    let page = body(at, "/rooms/5").await;
    assert!(page.contains("<dt>If it is so</dt>") && !page.contains("<dt>Do</dt>"));
    assert!(
        page.contains("card room silent")
            && page.contains("do not page")
            && !page.contains("class=\"owed sure\"")
    );
    assert!(page.contains("class=\"owed silent\"") && page.contains("since silent"));
    let page = body(at, "/rooms/6").await;
    assert!(
        page.contains("card room sure")
            && page.contains("class=\"owed sure\"")
            && !page.contains("do not page")
    );
    let exports = pipeline.stop();
    // Alone it is no alarm.
    let known = Known {
        rooms: vec![with(5, Confidence::Possible)],
        findings: vec![cause(5, Confidence::Possible)],
        closed: Vec::new(),
    };
    let pipeline = Pipeline::start(exports, known);
    let page = body(at, "/").await;
    assert!(
        page.contains("<h1>No room is known to be pinned</h1>") && page.contains("<title>no pin "),
        "{page}"
    );
    assert!(!page.contains("banner sure") && !page.contains("banner fine") && !page.contains("card sure"));
    pipeline.stop();
}

#[tokio::test]
async fn lists_are_bounded_and_say_what_is_not_shown() {
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let shared: Vec<u64> = (1000..1230).collect();
    let mut rooms: Vec<RoomSnapshot> = shared.iter().map(|n| with(*n, Confidence::Likely)).collect();
    for r in &mut rooms {
        r.verdict.as_mut().unwrap().group = 0xabc;
    }
    rooms.extend((1..=60).map(|n| RoomSnapshot { prefill: Some(view(Role::Prefill)), ..room(n) }));
    let mut findings = vec![Finding { rooms: shared[..100].to_vec(), room_count: 230, ..finding() }];
    findings.extend((0..50).map(|n| Finding {
        group: 0xf00 + n,
        rooms: Vec::new(),
        room_count: 0,
        ..finding()
    }));
    let pipeline = Pipeline::start(exports, Known { rooms, findings, closed: Vec::new() });
    let page = body(at, "/").await;
    assert!(page.contains("<h1>230 rooms are pinned</h1>") && page.contains("230 rooms pinned by it"));
    assert!(page.contains("and 222 more</li>"), "of one cause");
    assert!(page.contains("130 more pinned rooms not shown"));
    assert!(page.contains("11 more findings not shown"));
    assert!(page.contains("60 other open rooms") && page.contains("45 more open rooms not shown"));
    assert!(page.len() < 200_000, "{} bytes", page.len());
    pipeline.stop();
}

#[tokio::test]
async fn the_largest_room_number_is_the_same_everywhere() {
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let rooms = vec![with(u64::MAX, Confidence::Likely)];
    let pipeline = Pipeline::start(exports, Known { rooms, ..Known::default() });
    let page = body(at, "/").await;
    assert!(
        page.contains("<a class=\"number\" href=\"/rooms/18446744073709551615\">18446744073709551615</a>"),
        "{page}"
    );
    let page = body(at, "/rooms/18446744073709551615").await;
    assert!(page.contains("roomtrace explain 18446744073709551615"));
    pipeline.stop();
}

/// A page's text, in lines.
fn words(page: &str) -> String {
    let mut out = String::new();
    for part in page.split('<').skip(1) {
        out.push_str(part.split_once('>').unwrap().1);
    }
    out.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rooms_page_says_what_explain_says() {
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let mut with_all = everything(7);
    with_all.gpus.iter_mut().for_each(|g| g.series.clear());
    let mut open = everything(8);
    open.verdict = None;
    open.gpus.clear();
    let known =
        Known { rooms: vec![with_all, open, closed(9)], findings: vec![finding()], closed: Vec::new() };
    let pipeline = Pipeline::start(exports, known);
    for room in ["7", "8", "9"] {
        let page = words(&body(at, &format!("/rooms/{room}")).await);
        let mut explain = std::process::Command::new(env!("CARGO_BIN_EXE_roomtrace"));
        let api = format!("http://{at}");
        let said = tokio::task::spawn_blocking(move || {
            explain.args(["explain", room, "--api", &api]).output().unwrap()
        });
        let said = String::from_utf8(said.await.unwrap().stdout).unwrap();
        assert!(said.lines().count() > 8, "{said}");
        for line in said.lines().skip(1).map(|l| l.trim().trim_start_matches("- ")) {
            assert!(page.contains(line), "room {room}, not on its page: {line}\n{page}");
        }
        // The first line is the card, in its parts.
        for part in said.lines().next().unwrap().split(" · ").skip(1) {
            let part = part.trim_start_matches("do: ").trim_start_matches("upstream: ");
            assert!(page.contains(part), "room {room}, not on its page: {part}");
        }
    }
    pipeline.stop();
}

#[tokio::test]
async fn the_picture_has_every_source_and_hatches_what_was_not_measured() {
    let (exports, at) = started().await;
    let mut one_sided = pinned(8);
    one_sided.decode = None;
    let pipeline =
        Pipeline::start(exports, Known { rooms: vec![everything(7), one_sided], ..Known::default() });
    let page = body(at, "/rooms/7").await;
    let (_, picture) = page.split_once("<svg").unwrap();
    let (picture, _) = picture.split_once("</svg>").unwrap();
    for part in [
        ">prefill</tspan>",
        ">decode</tspan>",
        ">ABORT</text>",
        ">METADATA</text>",
        "class=\"phase transfer\"",
        "class=\"phase bootstrap\"",
        "owes STATUS",
        "pinned +11 s: abort_before_entry",
        "class=\"request\"",
        "class=\"request lost\"",
        "prefill prefill_forward, 2.0 s",
        "GPU-a pcie out (prefill), peak 134.2 MB/s",
        "GPU-a pcie in (prefill), peak 0 B/s",
        "GPU-b (prefill): not measured",
        "RDMA mlx5_0/1 (decode): 1.1 GB out, 0 B in",
        "xid 79",
    ] {
        assert!(picture.contains(part), "{part}: {picture}");
    }
    let page = body(at, "/rooms/8").await;
    assert!(page.contains("not seen from this host") && page.contains("class=\"unread\""), "{page}");
    assert!(page.contains("not measured: GPU copy activity"));
    pipeline.stop();
}

#[tokio::test]
async fn every_use_of_a_number_has_its_page() {
    let (exports, at) = started().await;
    let again = RoomSnapshot { incarnation: 1, ..pinned(3) };
    let pipeline = Pipeline::start(exports, Known { rooms: vec![closed(3), again], ..Known::default() });
    let page = body(at, "/rooms/3").await;
    assert!(
        page.contains("card room sure") && page.contains("href=\"/rooms/3?incarnation=0\">life 1</a>"),
        "{page}"
    );
    let page = body(at, "/rooms/3?incarnation=0").await;
    assert!(page.contains("closed: success after 2 s") && page.contains("card room over"), "{page}");
    assert!(page.contains("href=\"/rooms/3?incarnation=1\">life 2</a>"));
    pipeline.stop();
}

// Bounds.

#[tokio::test]
async fn a_pipeline_that_never_answers_gives_a_page_that_says_so_and_what_was_known() {
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let (status, _, page) = get(at, "/", "").await;
    strict(&page);
    assert_eq!(status, 503);
    assert!(
        page.contains("busy")
            && page.contains("2 rooms pinned, 0 more possible")
            && page.contains("lost at ring: full"),
        "{page}"
    );
    assert!(page.contains("http-equiv=\"refresh\"") && !page.contains("No room is"));
    let (status, _, page) = get(at, "/rooms/5", "").await;
    assert!(status == 503 && page.contains("busy"), "{page}");
    drop(exports);
}

#[tokio::test]
async fn pages_and_scrapes_work_while_the_table_is_at_its_bound() {
    use rooms_support::{MOONCAKE, Sees, World, decode, prefill};
    let config = rooms::Config { max_rooms: 2000, ..rooms::Config::default() };
    let mut w = World::with(Sees::Both, MOONCAKE, config);
    w.outlives = false;
    w.register(&decode(0), &prefill(0));
    for n in 0..2100 {
        w.metadata(u64::MAX - n, &decode(0), &prefill(0));
    }
    w.to(15_000);
    assert!(w.table.counters().turned_away.rooms >= 100);
    let table = std::mem::replace(&mut w.table, rooms::RoomTable::new(config));
    let (mut exports, at) = started().await;
    observing(&mut exports);
    let pipeline = Pipeline::of_table(exports, table);
    let page = body(at, "/").await;
    assert!(page.contains("2000 "), "{page}");
    assert!(body(at, "/rooms/18446744073709551615").await.contains("<h1>"));
    assert_eq!(get(at, "/metrics", "").await.0, 200);
    pipeline.stop();
}
