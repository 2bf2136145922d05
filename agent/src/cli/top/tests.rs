//! Screens of `top`, letter by letter (`ROOMTRACE_BLESS=1` rewrites `tests/fixtures/top`), and what keys do.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::path::PathBuf;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};
use serde_json::{Value, json};

#[path = "../../../tests/top_support/mod.rs"]
mod support;

use super::draw::{Paint, draw};
use super::picture::{Answers, Picture, Stand};
use super::state::{Act, Only, Press, Sort, State, View};
use super::{interval, no_terminal, once};
use crate::cli::{clean, explain};
use support::STEP;

const NO_COLOURS: Paint = Paint { colours: false };

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn answers(n: u64) -> Answers {
    let [pinned, overdue, open] = support::lists();
    let (findings, status, metrics) = (support::findings(), support::status(n), support::metrics(n));
    Answers { pinned, overdue, open, findings, status, metrics }
}

fn fresh() -> State {
    State::new("http://127.0.0.1:9713".to_owned(), seconds(STEP))
}

/// After two looks, the second just now.
fn watching() -> (State, Duration) {
    let mut state = fresh();
    for n in 0..2 {
        state.looked(Ok(&answers(n)), seconds(STEP * n));
    }
    (state, seconds(STEP))
}

fn drawn(state: &mut State, now: Duration, width: u16, height: u16, paint: Paint) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|f| draw(state, now, paint, f.area(), f.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

fn text_of(buffer: &Buffer) -> String {
    let area = buffer.area;
    let line = |y| {
        let cells: String = (0..area.width).map(|x| buffer[(x, y)].symbol()).collect();
        cells.trim_end().to_owned() + "\n"
    };
    (0..area.height).map(line).collect()
}

fn screen(state: &mut State, now: Duration, width: u16, height: u16) -> String {
    text_of(&drawn(state, now, width, height, NO_COLOURS))
}

/// Compares with the screen of this name.
fn golden(name: &str, got: &str) {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/top").join(format!("{name}.txt"));
    if std::env::var_os("ROOMTRACE_BLESS").is_some() {
        std::fs::write(&path, got).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(got, expected, "{name} differs:\n{got}");
}

#[test]
fn the_screen_at_the_usual_sizes() {
    for (name, width, height) in [("rooms-80x24", 80, 24), ("rooms-40x10", 40, 10), ("rooms-200x50", 200, 50)]
    {
        let (mut state, now) = watching();
        golden(name, &screen(&mut state, now, width, height));
    }
}

#[test]
fn the_other_pages() {
    for view in [View::Findings, View::Peers, View::Agent] {
        let (mut state, now) = watching();
        while state.view != view {
            state.press(Press::Tab);
        }
        golden(&format!("{}-80x24", view.name()), &screen(&mut state, now, 80, 24));
    }
    let (mut state, now) = watching();
    state.press(Press::Char('?'));
    golden("help-80x24", &screen(&mut state, now, 80, 24));
    golden("once", &once::page(&state));
}

#[test]
fn what_is_only_possible_is_told_apart_without_colours_and_with_them() {
    let (mut state, now) = watching();
    let text = screen(&mut state, now, 80, 24);
    assert!(text.contains("PINNED certain") && text.contains("PINNED likely"), "{text}");
    assert!(text.contains("pinned? possible") && !text.contains("PINNED possible"), "{text}");
    let plain = drawn(&mut state, now, 80, 24, NO_COLOURS);
    let coloured = drawn(&mut state, now, 80, 24, Paint { colours: true });
    assert_eq!(text_of(&plain), text_of(&coloured));
    assert!(plain.content.iter().all(|c| (c.fg, c.bg) == (Color::Reset, Color::Reset)), "no colour at all");
    assert!(
        coloured.content.iter().any(|c| c.fg == Color::Red)
            && coloured.content.iter().any(|c| c.fg == Color::Yellow)
    );
}

/// Only possible ones do not shout.
#[test]
fn nothing_that_does_not_page_is_written_in_capitals() {
    let mut state = fresh();
    let mut only = answers(0);
    let rooms = only.pinned["rooms"].as_array_mut().unwrap();
    rooms.retain(|r| r["verdict"]["confidence"] == "possible");
    state.looked(Ok(&only), seconds(0));
    let text = screen(&mut state, seconds(0), 80, 24);
    assert!(text.contains("pinned? 2 possible") && !text.contains("PINNED"), "{text}");
}

#[test]
fn nothing_open_is_said_in_words_and_what_is_not_measured_is_no_zero() {
    let empty = Answers {
        pinned: support::list(&[]),
        overdue: support::list(&[]),
        open: support::list(&[]),
        findings: json!({"findings": [], "total": 0, "closed": []}),
        status: json!({"host": "node-a", "version": "0.1.0", "uptime_s": 3, "rooms": {"views_open": 0, "overdue": 0}}),
        metrics: "roomtrace_rooms_open{role=\"prefill\",state=\"Failed\"} 0\n".to_owned(),
    };
    let mut state = fresh();
    state.looked(Ok(&empty), seconds(0));
    golden("nothing-open-80x24", &screen(&mut state, seconds(0), 80, 24));
    // The agent that tells nothing of it.
    let mut state = fresh();
    state.looked(Ok(&Answers::default()), seconds(0));
    let text = screen(&mut state, seconds(0), 80, 24);
    assert!(text.contains("pinned – · overdue – · open – · findings –"), "{text}");
    assert!(
        !text.contains("pinned 0") && !text.contains(" 0/s") && !text.contains("no open rooms"),
        "{text}"
    );
}

#[test]
fn rates_are_differences_and_begin_anew_with_the_agent() {
    let (state, _) = watching();
    let p = state.picture.as_ref().unwrap();
    assert_eq!(p.ended[0], [Some(815.0), Some(3.0)]);
    assert_eq!(p.ended[1], [None, None], "nothing is told of decode");
    assert_eq!((p.messages, p.lost_total, p.lost_rate), (Some(4100.0), Some(18.0), Some(3.0)));
    assert!((p.cpu.unwrap() - 0.012).abs() < 1e-6 && (p.kernel.unwrap() - 0.006).abs() < 1e-6);
    let rates: Vec<_> = p.peers.iter().map(|p| (p.decode.as_str(), p.rate)).collect();
    assert_eq!(
        rates,
        [("10.0.0.2:39871", Some(812.0)), ("10.0.0.2:39872", Some(1.5)), ("10.0.0.3:39871", None)]
    );
    // The first look has none.
    let first = Picture::new(&answers(0), seconds(0), None);
    assert_eq!((first.messages, first.cpu, first.peers[0].rate), (None, None, None));
    // A counter that went back; an agent that was started again, although its counters are higher already.
    let again = Picture::new(&answers(0), seconds(9), Some(p));
    assert_eq!((again.messages, again.lost_rate, again.peers[0].rate), (None, None, None));
    let restarted = Answers {
        metrics: support::metrics(5).replace("_start_time_seconds 17", "_start_time_seconds 18"),
        ..answers(5)
    };
    let restarted = Picture::new(&restarted, seconds(9), Some(p));
    assert_eq!((restarted.messages, restarted.cpu, restarted.peers[0].rate), (None, None, None));
    // Two looks at once say nothing.
    assert_eq!(Picture::new(&answers(2), seconds(STEP), Some(p)).messages, None);
}

#[test]
fn an_agent_that_does_not_answer_leaves_the_old_picture_marked_as_old() {
    let (mut state, now) = watching();
    state.looked(
        Err("no agent answers at http://127.0.0.1:9713: Connection refused".to_owned()),
        now + seconds(2),
    );
    golden("stale-80x24", &screen(&mut state, now + seconds(37), 80, 24));
    golden("stale-40x10", &screen(&mut state, now + seconds(37), 40, 10));
    let text = screen(&mut state, now + seconds(37), 80, 24);
    assert!(text.contains("STALE  last answer 37 s ago") && text.contains("PINNED 5"), "{text}");
    // Hanging counts as well, without any word from it.
    let (mut hanging, now) = watching();
    assert!(!screen(&mut hanging, now + seconds(4), 80, 24).contains("STALE"));
    assert!(screen(&mut hanging, now + seconds(20), 80, 24).contains("STALE  last answer 20 s ago"));
    state.looked(Ok(&answers(3)), now + seconds(40));
    assert!(!screen(&mut state, now + seconds(41), 80, 24).contains("STALE"));
}

#[test]
fn before_the_first_answer_nothing_is_claimed() {
    let mut state = fresh();
    assert!(screen(&mut state, seconds(0), 80, 24).contains("asking http://127.0.0.1:9713"));
    state.looked(Err("no agent answers: Connection refused".to_owned()), seconds(0));
    golden("no-answer-80x24", &screen(&mut state, seconds(5), 80, 24));
    assert!(!screen(&mut state, seconds(5), 80, 24).contains("pinned 0"));
    for size in [(40, 10), (20, 3), (1, 1)] {
        assert!(!screen(&mut state, seconds(5), size.0, size.1).contains("pinned 0"));
    }
}

#[test]
fn ten_thousand_pinned_rooms_are_counted_and_it_is_said_that_not_all_are_listed() {
    let mut many = answers(0);
    let rooms: Vec<Value> = (0..200)
        .map(|n| {
            let mut r = support::record(&support::ROOMS[usize::try_from(n).unwrap() % 5]);
            r["room"] = (1_000_000_000_000_000_000_u64 + n).to_string().into();
            r
        })
        .collect();
    many.pinned = json!({ "rooms": rooms, "next": "1000000000000000199.0" });
    many.status["rooms"]["views_open"] = 10_004.into();
    many.metrics =
        many.metrics.replace("owed_instance=\"10.0.0.1\"} 2\n", "owed_instance=\"10.0.0.1\"} 4999\n");
    let mut state = fresh();
    state.looked(Ok(&many), seconds(0));
    let text = screen(&mut state, seconds(0), 80, 24);
    golden("ten-thousand-80x24", &text);
    assert!(text.contains("PINNED 9999: 4999 certain, 1 likely, 4999 possible?"), "{text}");
    assert!(text.contains("listed only 200 of 9999 pinned"), "{text}");
    state.press(Press::End);
    let text = screen(&mut state, seconds(0), 80, 24);
    assert!(text.lines().any(|l| l.starts_with("> ") && l.contains("open")), "{text}");
}

#[test]
fn strings_of_others_command_nothing() {
    let mut hostile = answers(0);
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J\n\u{202e}evil\u{200b}\u{9b}31m";
    for room in hostile.pinned["rooms"].as_array_mut().unwrap() {
        room["request"] = json!({ "rid": evil });
        room["verdict"]["owed_by"]["comm"] = evil.into();
        room["verdict"]["owed_by"]["container"] = evil.into();
        room["verdict"]["class"] = evil.into();
        room["room"] = "7\u{1b}[31m".into();
    }
    hostile.findings["findings"][0]["evidence"] = json!([evil]);
    hostile.status["host"] = evil.into();
    for value in [&mut hostile.pinned, &mut hostile.findings, &mut hostile.status] {
        clean::json(value);
    }
    let mut state = fresh();
    state.looked(Ok(&hostile), seconds(0));
    for view in View::ALL {
        let text = screen(&mut state, seconds(0), 120, 40);
        let wrong = |c: char| {
            (c.is_control() && c != '\n') || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}')
        };
        assert!(!text.contains(wrong), "{view:?}: {text:?}");
        assert_eq!(text.lines().count(), 40);
        state.press(Press::Tab);
    }
    let text = screen(&mut state, seconds(0), 200, 50);
    golden("hostile-200x50", &text);
    // What forgot to clean is stopped at the cells, too.
    let mut state = fresh();
    let mut raw = answers(0);
    raw.status["host"] = evil.into();
    state.looked(Ok(&raw), seconds(0));
    assert!(!screen(&mut state, seconds(0), 80, 24).contains(['\u{1b}', '\u{7}']));
}

#[test]
fn every_size_is_drawn_without_a_panic_and_nothing_is_half_a_number() {
    let mut states = vec![fresh(), watching().0];
    let mut old = watching().0;
    old.looked(Err("gone".to_owned()), seconds(3));
    states.push(old);
    let mut page = watching().0;
    page.press(Press::Enter);
    page.explained("5123456789012345678", Ok(explain::page(&support::record(&support::ROOMS[0]), &[])));
    page.press(Press::End);
    states.push(page);
    let mut help = watching().0;
    help.press(Press::Char('h'));
    states.push(help);
    for state in &mut states {
        for view in View::ALL {
            if state.page.is_none() && !state.help {
                state.view = view;
            }
            for width in (0..25).chain([39, 40, 59, 60, 75, 76, 80, 99, 100, 300]) {
                for height in (0..16).chain([23, 24, 35, 60]) {
                    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
                    draw(state, seconds(30), NO_COLOURS, buffer.area, &mut buffer);
                    if width >= 22
                        && height >= 1
                        && state.picture.is_some()
                        && state.page.is_none()
                        && !state.help
                    {
                        let text = text_of(&buffer);
                        let counted =
                            if width < 60 { "PINNED 5 (2 possible?)" } else { "PINNED 5: 2 certain" };
                        assert!(text.contains(counted), "{width}x{height}:\n{text}");
                    }
                }
            }
        }
    }
}

#[test]
fn an_area_beside_the_buffer_is_not_drawn_on() {
    let mut state = watching().0;
    let mut buffer = Buffer::empty(Rect::new(5, 5, 10, 3));
    draw(&mut state, seconds(2), NO_COLOURS, Rect::new(0, 0, 80, 24), &mut buffer);
    draw(&mut state, seconds(2), NO_COLOURS, Rect::new(60000, 60000, 80, 24), &mut buffer);
}

fn order(state: &State) -> Vec<&str> {
    state.rows().iter().map(|r| r.key.0.as_str()).collect()
}

#[test]
fn rooms_are_sorted_by_what_was_asked_for_and_numbers_as_numbers() {
    let (mut state, _) = watching();
    let urgent = order(&state)[..5].to_vec();
    assert_eq!(urgent, ["5123456789012345678", "18446744073709551615", "7", "6006006006006006006", "812"]);
    let sorts: Vec<Sort> = (0..5)
        .map(|_| {
            state.press(Press::Char('s'));
            state.sort
        })
        .collect();
    assert_eq!(sorts, [Sort::Age, Sort::Verdict, Sort::Owes, Sort::Room, Sort::Urgency]);
    state.sort = Sort::Age;
    assert_eq!(order(&state)[..3], ["5123456789012345678", "18446744073709551615", "4100000000000000001"]);
    state.sort = Sort::Room;
    assert_eq!(order(&state)[..4], ["7", "91", "812", "4100000000000000001"]);
    state.press(Press::Char('r'));
    assert_eq!(order(&state)[0], "18446744073709551615");
    (state.sort, state.reversed) = (Sort::Verdict, false);
    let classes: Vec<_> = state.rows().iter().map(|r| r.class.clone()).collect();
    assert_eq!((classes[0].as_str(), classes[8].as_str()), ("abort_before_entry", ""));
    state.sort = Sort::Owes;
    assert!(state.rows()[0].owes[0].starts_with("decode rank 1"), "{:?}", state.rows()[0].owes);
}

#[test]
fn rooms_are_filtered_by_how_they_stand_and_by_text() {
    let (mut state, now) = watching();
    let mut counts = Vec::new();
    for _ in 0..4 {
        state.press(Press::Char('f'));
        counts.push((state.only, state.rows().len()));
    }
    assert_eq!(counts, [(Only::Pinned, 5), (Only::Sure, 3), (Only::Overdue, 2), (Only::All, 9)]);
    for (typed, found) in
        [("CHATCMPL-7", 1), ("10.0.0.1:41207", 2), ("abort_before", 1), ("c0ffee", 5), ("no such word", 0)]
    {
        state.press(Press::Char('/'));
        for c in typed.chars() {
            assert_eq!(state.press(Press::Char(c)), Act::Nothing, "keys are text now");
        }
        assert!(screen(&mut state, now, 80, 24).contains(&format!("search: {typed}_")));
        state.press(Press::Enter);
        assert_eq!(state.rows().len(), found, "{typed}");
        state.press(Press::Escape);
    }
    state.press(Press::Char('/'));
    for _ in 0..1000 {
        state.press(Press::Char('ä'));
    }
    state.press(Press::Backspace);
    assert_eq!(state.search.chars().count(), 63, "bounded");
    state.press(Press::Enter);
    assert!(screen(&mut state, now, 80, 24).contains("no listed room is like that"));
    state.press(Press::Escape);
    assert_eq!(state.rows().len(), 9);
}

#[test]
fn the_cursor_stays_with_its_room() {
    let (mut state, now) = watching();
    screen(&mut state, now, 80, 24);
    for _ in 0..2 {
        state.press(Press::Down);
    }
    let under = |state: &State| {
        let rows = state.rows();
        rows[state.cursor_in(&rows)].key.0.clone()
    };
    assert_eq!(under(&state), "7");
    state.press(Press::Char('r'));
    assert_eq!(under(&state), "7", "in any order");
    let mut gone = answers(2);
    gone.pinned["rooms"].as_array_mut().unwrap().retain(|r| r["room"] != "7");
    state.press(Press::Char('r'));
    state.looked(Ok(&gone), seconds(4));
    assert_eq!(under(&state), "6006006006006006006", "where it was");
    for (key, room) in
        [(Press::Home, "5123456789012345678"), (Press::End, "91"), (Press::Up, "4200000000000000000")]
    {
        state.press(key);
        assert_eq!(under(&state), room, "{key:?}");
    }
    let mut none = answers(3);
    (none.pinned, none.overdue, none.open) = (support::list(&[]), support::list(&[]), support::list(&[]));
    state.looked(Ok(&none), seconds(6));
    for key in [Press::Up, Press::Down, Press::End, Press::PageDown, Press::Enter] {
        assert_eq!(state.press(key), Act::Nothing);
    }
}

#[test]
fn enter_opens_the_page_that_explain_prints() {
    let (mut state, now) = watching();
    assert_eq!(state.press(Press::Enter), Act::Explain("5123456789012345678".to_owned(), Some(0)));
    assert!(screen(&mut state, now, 80, 24).contains("asking for room 5123456789012345678"));
    let findings = support::findings();
    let page = explain::page(&support::record(&support::ROOMS[0]), findings["findings"].as_array().unwrap());
    state.explained("another room", Ok("wrong".to_owned()));
    state.explained("5123456789012345678", Ok(page.clone()));
    golden("explanation-80x24", &screen(&mut state, now, 80, 24));
    // Nothing of it is left out, on any width.
    let squeezed = |s: &str| s.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    for width in [40, 80, 300] {
        let shown = screen(&mut state, now, width, 500);
        let body: String = shown.lines().skip(1).take(498).collect();
        assert_eq!(squeezed(&body), squeezed(&page), "{width}");
    }
    screen(&mut state, now, 80, 24);
    state.press(Press::End);
    let end = screen(&mut state, now, 80, 24);
    assert!(end.contains("upstream") && end.contains("fixed in 0.5.21"), "{end}");
    state.press(Press::Char('k'));
    assert_ne!(screen(&mut state, now, 80, 24), end);
    // It ended meanwhile: what is there stays, marked.
    state.explained("5123456789012345678", Err("the agent does not know this room any more".to_owned()));
    let text = screen(&mut state, now, 80, 24);
    assert!(text.contains("NOT REFRESHED: the agent does not know") && text.contains("upstream"), "{text}");
    assert_eq!(state.press(Press::Char('q')), Act::Nothing, "back, not out");
    assert!(state.page.is_none());
    assert_eq!(state.press(Press::Char('q')), Act::Quit);
}

#[test]
fn a_finding_opens_its_first_room() {
    let (mut state, now) = watching();
    state.press(Press::Tab);
    screen(&mut state, now, 80, 24);
    assert_eq!(state.press(Press::Enter), Act::Explain("5123456789012345678".to_owned(), None));
    state.press(Press::Escape);
    state.press(Press::Down);
    screen(&mut state, now, 80, 24);
    assert_eq!(state.press(Press::Enter), Act::Nothing, "the other one has none");
    state.press(Press::BackTab);
    assert_eq!(state.view, View::Rooms);
}

#[test]
fn control_c_ends_it_everywhere() {
    for keys in [&[][..], &[Press::Char('/')], &[Press::Enter], &[Press::Char('?')]] {
        let (mut state, _) = watching();
        for key in keys {
            state.press(*key);
        }
        assert_eq!(state.press(Press::Break), Act::Quit);
    }
}

#[test]
fn a_look_without_changes_sends_nothing_but_ages() {
    let (mut state, now) = watching();
    let before = drawn(&mut state, now, 80, 24, NO_COLOURS);
    state.looked(Ok(&answers(2)), now + seconds(STEP));
    let after = drawn(&mut state, now + seconds(STEP), 80, 24, NO_COLOURS);
    let cells = before.diff(&after).len();
    assert!(cells < 20, "{cells} cells");
}

#[test]
fn rows_are_marked_bold_or_reversed_only_where_they_should() {
    let (mut state, now) = watching();
    let buffer = drawn(&mut state, now, 80, 24, NO_COLOURS);
    let reversed: Vec<u16> =
        (0..24).filter(|y| buffer[(70, *y)].modifier.contains(Modifier::REVERSED)).collect();
    assert_eq!(reversed.len(), 1, "the cursor's line");
}

#[test]
fn stands_are_in_the_order_of_urgency() {
    let all = [Stand::PinnedCertain, Stand::PinnedLikely, Stand::PinnedPossible, Stand::Overdue, Stand::Open];
    assert!(all.is_sorted());
}

#[test]
fn where_nothing_can_be_drawn_it_is_said_so() {
    assert_eq!(no_terminal(true, Some("xterm-256color")), None);
    assert!(no_terminal(true, Some("dumb")).unwrap().contains("TERM=dumb"));
    assert!(no_terminal(true, None).is_some() && no_terminal(false, Some("xterm")).is_some());
    assert_eq!(interval("2s"), Ok(seconds(2)));
    assert!(interval("10ms").is_err() && interval("2h").is_err() && interval("x").is_err());
}
