//! What parent and worker send each other: frames are cut out of any bytes within their limit, and
//! what is understood says itself again.
#![no_main]

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use libfuzzer_sys::fuzz_target;
use nccltune::process::read_frame;
use nccltune::worker::protocol::{Answer, Order, from_hex, read_order, to_hex};

/// Small, so that inputs reach it.
const LIMIT: u64 = 512;

/// The next frame. A reader in memory never has to wait.
fn next(reader: &mut &[u8]) -> Option<Result<String, &'static str>> {
    match pin!(read_frame(reader, LIMIT)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(frame) => frame,
        Poll::Pending => unreachable!("bytes in memory are all there"),
    }
}

fuzz_target!(|bytes: &[u8]| {
    // The parent's side.
    let mut rest = bytes;
    let mut position = 0;
    while let Some(frame) = next(&mut rest) {
        let taken = bytes.len() - rest.len();
        assert!(taken > position && (taken - position) as u64 <= LIMIT, "a frame is some bytes and not too many");
        if let Ok(line) = frame {
            assert_eq!(line.as_bytes(), &bytes[position..taken - 1], "nothing is changed on the way");
            assert!(!line.contains('\n'));
            if let Ok(answer) = serde_json::from_str::<Answer>(&line) {
                let text = serde_json::to_string(&answer).expect("an answer is JSON");
                assert_eq!(serde_json::from_str::<Answer>(&text).ok(), Some(answer), "{text}");
            }
            if let Some(id) = from_hex::<8>(&line) {
                assert_eq!(to_hex(&id), line.to_ascii_lowercase());
            }
        }
        position = taken;
    }
    assert_eq!(position, bytes.len());
    // The worker's side.
    let mut orders = bytes;
    while let Ok(Some(order)) = read_order(&mut orders) {
        let Ok(order) = order else { continue };
        assert!(!order.step().is_empty());
        let text = serde_json::to_string(&order).expect("an order is JSON");
        assert_eq!(serde_json::from_str::<Order>(&text).ok(), Some(order), "{text}");
    }
});
