//! The worker's end of the socket: file descriptor 0.

use std::io::{BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use super::protocol::{Answer, Order, read_order};

/// Exit status of a worker whose parent is gone.
const PARENT_GONE: i32 = 86;

/// Reads orders on a thread of its own, so that the end of the parent ends the worker even while
/// its main thread waits for a GPU that will never answer.
pub(super) struct Connection {
    orders: mpsc::Receiver<Result<Order, String>>,
    stream: UnixStream,
}

impl Connection {
    pub(super) fn open() -> std::io::Result<Self> {
        let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        let reading = stream.try_clone()?;
        let (sender, orders) = mpsc::channel();
        std::thread::Builder::new().name("orders".to_owned()).spawn(move || read_orders(reading, &sender))?;
        Ok(Self { orders, stream })
    }

    /// The next order; an error is a parent that cannot be understood.
    pub(super) fn next(&self) -> Result<Order, String> {
        self.orders.recv().unwrap_or_else(|_| Err("the reader ended".to_owned()))
    }

    pub(super) fn answer(&mut self, answer: &Answer) -> std::io::Result<()> {
        let mut line = serde_json::to_string(answer).map_err(std::io::Error::other)?;
        line.push('\n');
        self.stream.write_all(line.as_bytes())
    }
}

#[expect(clippy::exit, reason = "the main thread may be stuck in a driver call; nothing else can end it")]
fn read_orders(stream: UnixStream, sender: &mpsc::Sender<Result<Order, String>>) {
    let mut reader = BufReader::new(stream);
    loop {
        match read_order(&mut reader) {
            Ok(None) | Err(_) => std::process::exit(PARENT_GONE),
            Ok(Some(order)) => {
                if sender.send(order).is_err() {
                    return;
                }
            }
        }
    }
}
