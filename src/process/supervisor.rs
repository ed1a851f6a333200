//! The supervisor thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::group::{ChildSpec, Group, Order, run_group};
use crate::clock::Deadline;
use crate::error_kind::{Classified, ErrorKind};

/// Signals this close together are one wish: `timeout` sends its own twice, to the process and to its
/// group. Nobody who saw that the first did not end the program is this quick.
const ONE_PRESS: Duration = Duration::from_millis(200);

/// Why children could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// The supervisor thread could not be started.
    #[error("could not start the supervisor thread: {0}")]
    Thread(#[source] std::io::Error),
    /// A child could not be started.
    #[error("could not start a worker process: {0}")]
    Spawn(#[source] std::io::Error),
    /// The supervisor thread is gone.
    #[error("the supervisor thread ended unexpectedly")]
    Gone,
}

impl Classified for SupervisorError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unexpected
    }
}

pub(super) enum Request {
    Start { specs: Vec<ChildSpec>, reply: std::sync::mpsc::Sender<Result<Group, std::io::Error>> },
    Stop,
}

/// The parent of all children, and the listener for Ctrl-C.
pub struct Supervisor {
    requests: mpsc::UnboundedSender<Request>,
    interrupts: Arc<AtomicU8>,
    thread: Option<JoinHandle<()>>,
}

impl Supervisor {
    /// Starts the thread. From here on Ctrl-C and SIGTERM no longer end the process at once: the
    /// first asks for an orderly stop ([`Supervisor::interrupted`]), the second kills all children and
    /// asks for a stop without delay ([`Supervisor::killed`]).
    pub fn start() -> Result<Self, SupervisorError> {
        let (requests, inbox) = mpsc::unbounded_channel();
        let interrupts = Arc::new(AtomicU8::new(0));
        let seen = Arc::clone(&interrupts);
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(SupervisorError::Thread)?;
        // Here and not on the thread, which may be slow to start: whoever has a supervisor is never ended
        // by a signal as any program would be. Should handlers be refused, children still end by
        // themselves, since their channel closes.
        let signals = {
            let _entered = runtime.enter();
            [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| signal(kind).ok())
        };
        let thread = std::thread::Builder::new()
            .name("supervisor".to_owned())
            .spawn(move || tokio::task::LocalSet::new().block_on(&runtime, supervise(inbox, seen, signals)))
            .map_err(SupervisorError::Thread)?;
        Ok(Self { requests, interrupts, thread: Some(thread) })
    }

    /// Starts children together, in one process group of their own.
    pub fn start_group(&self, specs: Vec<ChildSpec>) -> Result<Group, SupervisorError> {
        let (reply, answer) = std::sync::mpsc::channel();
        self.requests.send(Request::Start { specs, reply }).map_err(|_| SupervisorError::Gone)?;
        answer.recv().map_err(|_| SupervisorError::Gone)?.map_err(SupervisorError::Spawn)
    }

    /// Whether the user asked for an orderly stop.
    pub fn interrupted(&self) -> bool {
        self.interrupts.load(Ordering::Relaxed) > 0
    }

    /// Whether the user asked again and waits for nothing any more. Children that are seen to end after
    /// that were killed: this is true before the first of them is.
    pub fn killed(&self) -> bool {
        self.interrupts.load(Ordering::Relaxed) > 1
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The thread ends its groups (by SIGKILL) before it returns.
        let _ = self.requests.send(Request::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn supervise(
    mut inbox: mpsc::UnboundedReceiver<Request>,
    interrupts: Arc<AtomicU8>,
    [mut interrupt, mut terminate]: [Option<tokio::signal::unix::Signal>; 2],
) {
    let mut groups: Vec<mpsc::UnboundedSender<Order>> = Vec::new();
    let mut press = None;
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            request = inbox.recv() => match request {
                Some(Request::Start { specs, reply }) => {
                    groups.retain(|orders| !orders.is_closed());
                    match run_group(specs, &mut tasks) {
                        Ok((group, orders)) => {
                            groups.push(orders);
                            // A caller that went away drops its group, which stops the children.
                            let _ = reply.send(Ok(group));
                        }
                        Err(error) => {
                            let _ = reply.send(Err(error));
                        }
                    }
                }
                Some(Request::Stop) | None => break,
            },
            () = received(&mut interrupt) => on_interrupt(&interrupts, &mut press, &groups),
            () = received(&mut terminate) => on_interrupt(&interrupts, &mut press, &groups),
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
        }
    }
    for orders in &groups {
        let _ = orders.send(Order::Kill);
    }
    // A closed channel is how a group learns to give up on a child that not even SIGKILL ends.
    drop(groups);
    while tasks.join_next().await.is_some() {}
}

async fn received(signal: &mut Option<tokio::signal::unix::Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

fn on_interrupt(interrupts: &AtomicU8, press: &mut Option<Deadline>, groups: &[mpsc::UnboundedSender<Order>]) {
    if press.is_some_and(|press| !press.is_over()) {
        return;
    }
    *press = Some(Deadline::after(ONE_PRESS));
    // Counted no further than it means anything, so that it cannot run over.
    if interrupts.load(Ordering::Relaxed) == 0 {
        interrupts.store(1, Ordering::Relaxed);
        return;
    }
    interrupts.store(2, Ordering::Relaxed);
    // The second Ctrl-C: the user does not want to wait. Kill what runs; the journal on disk is
    // complete up to the last event by construction.
    for orders in groups {
        let _ = orders.send(Order::Kill);
    }
}
