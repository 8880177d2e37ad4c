//! A group of processes, each with its own device. Messages between them use TCP and pass through rank 0.

mod join;
mod message;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::error::OpError;
use join::Place;
pub use message::Message;
use message::{ALL, Head, Kind};

/// Number of lanes for callers. Lanes from here on are internal.
const OWN_LANES: u32 = 1 << 16;
/// Lane that stands for all lanes.
const EVERY_LANE: u32 = u32::MAX;

/// Time limits of connections.
#[derive(Clone, Copy)]
struct Patience {
    /// Time for all processes to connect.
    join: Duration,
    /// Interval between two signs of life.
    alive: Duration,
    /// Time without a sign of life after which a process is lost.
    silence: Duration,
}

const PATIENCE: Patience = Patience {
    join: Duration::from_secs(120),
    alive: Duration::from_secs(3),
    silence: Duration::from_secs(15),
};

/// This process in a group of processes on one host or several, as `torchrun` and `mpirun` start them.
///
/// Rank 0 listens, all others connect to it, and all messages pass through it. Messages have lanes: those of one sender and one lane arrive in
/// order. A process is lost if its connection ends, if it is silent for 15 seconds, or if it reports a failure ([`Self::fail`]). Then all waiting
/// in every other process ends with [`OpError::Lost`], which names the lost process. Rank 0 must leave last.
///
/// Nothing is encrypted or authenticated: use it only in a trusted network.
///
/// ```no_run
/// use burn_blocksparse::{Message, Processes};
///
/// // RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
/// let processes = Processes::from_env()?;
/// match processes.rank() {
///     0 => (1..processes.count()).try_for_each(|rank| {
///         println!("{:?}", processes.receive(rank, 0)?.words);
///         Ok::<(), burn_blocksparse::OpError>(())
///     })?,
///     rank => processes.send(0, 0, &Message { words: vec![rank as u64], tensors: vec![] })?,
/// }
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
pub struct Processes {
    shared: Arc<Shared>,
    place: Place,
    /// Number of internal lanes handed out.
    lanes: AtomicU32,
}

/// State that the threads of connections share.
struct Shared {
    rank: usize,
    count: usize,
    /// Connections, by the rank at the other end.
    sockets: Vec<Option<Mutex<TcpStream>>>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
    /// Payload bytes, without headers.
    sent: AtomicU64,
    received: AtomicU64,
}

#[derive(Default)]
struct Inbox {
    /// Received messages by sender and lane.
    messages: HashMap<(usize, u32), VecDeque<Vec<u8>>>,
    /// Ended lanes by sender and lane.
    ended: HashSet<(usize, u32)>,
    lost: Option<OpError>,
    /// A loss that other processes do not know of yet. One of them may leave because of it before they do.
    losing: Option<OpError>,
    /// True if this process has left.
    closed: bool,
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} processes", self.rank(), self.count())
    }
}

/// Processes are equal only to themselves.
impl PartialEq for Processes {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Processes {
    /// Joins the group described by the environment: `RANK`, `WORLD_SIZE`, `LOCAL_RANK` (default 0), or OpenMPI's `OMPI_COMM_WORLD_…` instead.
    /// Rank 0 listens at `MASTER_ADDR` (default `127.0.0.1`) and `MASTER_PORT` (default 29500). If `torchrun` itself listens at that port, the next one is
    /// used.
    ///
    /// # Errors
    /// [`OpError::Argument`] names a variable that is missing or invalid; [`OpError::Join`] tells why processes did not connect within two minutes.
    pub fn from_env() -> Result<Self, OpError> {
        let place = Place::of_environment(|name| std::env::var(name).ok())?;
        Self::at(&place, PATIENCE)
    }

    /// Joins a group as rank `rank` of `count`. Rank 0 listens at the port of the address.
    ///
    /// # Errors
    /// As [`Self::from_env`].
    pub fn join(rank: usize, count: usize, address: &str, port: u16) -> Result<Self, OpError> {
        Self::at(&Place::new(rank, count, address, port), PATIENCE)
    }

    fn at(place: &Place, patience: Patience) -> Result<Self, OpError> {
        let sockets = place.connect(patience.join)?;
        let failed = |error: io::Error| OpError::Join {
            address: place.address.clone(),
            reason: error.to_string(),
        };
        let mut ends = Vec::new();
        for (peer, socket) in sockets.iter().enumerate() {
            if let Some(socket) = socket {
                socket.set_nodelay(true).map_err(failed)?;
                socket
                    .set_read_timeout(Some(patience.silence))
                    .map_err(failed)?;
                ends.push((peer, socket.try_clone().map_err(failed)?));
            }
        }
        let shared = Arc::new(Shared {
            rank: place.rank,
            count: place.count,
            sockets: sockets
                .into_iter()
                .map(|socket| socket.map(Mutex::new))
                .collect(),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        });
        for (peer, end) in ends {
            let (reads, lives) = (shared.clone(), shared.clone());
            thread::spawn(move || reads.read_from(peer, end));
            thread::spawn(move || lives.live_for(peer, patience.alive));
        }
        Ok(Self {
            shared,
            place: place.clone(),
            lanes: AtomicU32::new(OWN_LANES),
        })
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Returns the number of processes.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Returns the rank of this process among those of its host.
    pub fn local_rank(&self) -> usize {
        self.place.local_rank
    }

    /// Returns whether all processes run on one host, according to `LOCAL_WORLD_SIZE`.
    pub fn are_of_one_host(&self) -> bool {
        self.place.local_count == Some(self.count())
    }

    /// Sends a message to another process. Returns when the connection has accepted it, whether or not it has been received.
    ///
    /// # Errors
    /// [`OpError::Lost`] and [`OpError::Left`] name a process that is gone; [`OpError::Argument`] names a dtype that cannot be sent.
    ///
    /// # Panics
    /// If there is no other process of this rank, or the lane is invalid: lanes from 65,536 on are internal.
    pub fn send(&self, to: usize, lane: u16, message: &Message) -> Result<(), OpError> {
        self.put(to, lane.into(), message)
    }

    /// Waits for the next message of another process in a lane.
    ///
    /// # Errors
    /// [`OpError::Lost`] names any process that is lost; [`OpError::Left`] means that the sender has left.
    pub fn receive(&self, from: usize, lane: u16) -> Result<Message, OpError> {
        self.take(from, lane.into())
    }

    /// Returns which process is lost, and why, if one is.
    pub fn lost(&self) -> Option<OpError> {
        self.shared.inbox().lost.clone()
    }

    /// Calls a function in its own thread once a process is lost. It is never called if this process leaves first.
    pub fn on_loss(&self, then: impl FnOnce(OpError) + Send + 'static) {
        let shared = self.shared.clone();
        thread::spawn(move || {
            let mut inbox = shared.inbox();
            while inbox.lost.is_none() && !inbox.closed {
                inbox = shared.wait(inbox);
            }
            let lost = inbox.lost.clone();
            drop(inbox);
            if let Some(lost) = lost {
                then(lost);
            }
        });
    }

    /// Tells all other processes that this one has failed, which ends their waiting.
    pub fn fail(&self, reason: &str) {
        self.shared.lose(self.rank(), reason);
    }

    /// Leaves the group: processes that wait for this one get [`OpError::Left`]. Dropping it has the same effect.
    pub fn leave(&self) {
        let mut inbox = self.shared.inbox();
        if !std::mem::replace(&mut inbox.closed, true) {
            drop(inbox);
            self.shared.tell(Kind::Left, EVERY_LANE, b"");
            self.shared.changed.notify_all();
            for socket in self.shared.sockets.iter().flatten() {
                let _ = lock(socket).shutdown(Shutdown::Write);
            }
        }
    }

    /// Returns the bytes that this process has sent and received so far, including those that it forwards to others.
    pub fn traffic(&self) -> [u64; 2] {
        let shared = &self.shared;
        [&shared.sent, &shared.received].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    /// Returns a fresh lane. All processes that call this equally often get the same one.
    pub(crate) fn own_lane(&self) -> u32 {
        self.lanes.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn put(&self, to: usize, lane: u32, message: &Message) -> Result<(), OpError> {
        assert!(
            to < self.count() && to != self.rank(),
            "rank {to} of {self:?}"
        );
        let content = message.encode()?;
        let shared = &self.shared;
        let sent = shared.write(Kind::Message, to as u32, lane, &content);
        // The reading thread detects which process is gone, or has already been told.
        sent.or_else(|_| shared.until(to, lane, |_| None))
    }

    pub(crate) fn take(&self, from: usize, lane: u32) -> Result<Message, OpError> {
        let next = |inbox: &mut Inbox| inbox.messages.get_mut(&(from, lane))?.pop_front();
        let content = self.shared.until(from, lane, next)?;
        let rank = from;
        Message::decode(&content).ok_or_else(|| lost(rank, "it sent what cannot be read"))
    }

    pub(crate) fn end(&self, lane: u32) {
        self.shared.tell(Kind::Left, lane, b"");
        self.shared.inbox().ended.insert((self.rank(), lane));
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        lock(&self.inbox)
    }

    fn wait<'a>(&self, inbox: MutexGuard<'a, Inbox>) -> MutexGuard<'a, Inbox> {
        let woken = self.changed.wait(inbox);
        woken.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `take` returns something. Returns an error once nothing more can arrive from a process in a lane.
    fn until<T>(
        &self,
        other: usize,
        lane: u32,
        mut take: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Result<T, OpError> {
        let mut inbox = self.inbox();
        loop {
            if let Some(lost) = &inbox.lost {
                return Err(lost.clone());
            }
            if let Some(found) = take(&mut inbox) {
                return Ok(found);
            }
            // Without rank 0 nothing is forwarded.
            let ends = [
                (other, lane),
                (other, EVERY_LANE),
                (0, EVERY_LANE),
                (self.rank, lane),
            ];
            let end = ends.iter().find(|end| inbox.ended.contains(end));
            if let Some(&(rank, _)) = end {
                return Err(inbox.losing.clone().unwrap_or(OpError::Left { rank }));
            }
            if inbox.closed {
                return Err(OpError::Left { rank: self.rank });
            }
            inbox = self.wait(inbox);
        }
    }

    /// Sends a frame of this process.
    fn write(&self, kind: Kind, to: u32, lane: u32, content: &[u8]) -> io::Result<()> {
        let from = self.rank as u32;
        let head = Head {
            kind,
            from,
            to,
            lane,
        };
        self.pass(&head, content)
    }

    /// Sends a frame to its recipient or towards it.
    fn pass(&self, head: &Head, content: &[u8]) -> io::Result<()> {
        let next = if self.rank == 0 { head.to as usize } else { 0 };
        let socket = self.sockets.get(next).and_then(Option::as_ref);
        let mut socket = lock(socket.ok_or(io::ErrorKind::NotConnected)?);
        socket.write_all(&head.bytes(content.len()))?;
        socket.write_all(content)?;
        self.sent.fetch_add(content.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Sends a frame of this process to all others that are reachable.
    fn tell(&self, kind: Kind, lane: u32, content: &[u8]) {
        match self.rank {
            0 => (1..self.count as u32).for_each(|to| {
                let _ = self.write(kind, to, lane, content);
            }),
            _ => {
                let _ = self.write(kind, ALL, lane, content);
            }
        }
    }

    /// Handles the frames of a connection until it ends: the body of a reading thread.
    fn read_from(&self, peer: usize, mut socket: TcpStream) {
        let error = loop {
            match Head::read(&mut socket) {
                Ok((head, content)) => self.arrived(head, content),
                Err(error) => break error,
            }
        };
        // Unblocks pending writes.
        let _ = socket.shutdown(Shutdown::Both);
        let has_left = self.inbox().ended.contains(&(peer, EVERY_LANE));
        if !has_left {
            self.lose(peer, &reason(&error));
        }
    }

    fn arrived(&self, head: Head, content: Vec<u8>) {
        self.received
            .fetch_add(content.len() as u64, Ordering::Relaxed);
        let Head { from, to, lane, .. } = head;
        if to == ALL && self.rank == 0 {
            for to in (1..self.count as u32).filter(|&to| to != from) {
                let _ = self.pass(&Head { to, ..head }, &content);
            }
        } else if to != self.rank as u32 {
            // If that process is gone, its own thread reports it.
            let _ = self.pass(&head, &content);
            return;
        }
        let (rank, mut inbox) = (from as usize, self.inbox());
        match head.kind {
            Kind::Alive => return,
            Kind::Message => {
                let queue = inbox.messages.entry((rank, lane)).or_default();
                queue.push_back(content);
            }
            Kind::Left => {
                inbox.ended.insert((rank, lane));
            }
            Kind::Lost => {
                let reason = String::from_utf8_lossy(&content);
                inbox.lost.get_or_insert(lost(lane as usize, &reason));
            }
        }
        self.changed.notify_all();
    }

    /// Ends all waiting, here and in the other processes.
    fn lose(&self, rank: usize, reason: &str) {
        let error = lost(rank, reason);
        let mut inbox = self.inbox();
        if inbox.closed || inbox.lost.is_some() || inbox.losing.is_some() {
            return;
        }
        inbox.losing = Some(error.clone());
        drop(inbox);
        // The others are told first, because this process may exit as soon as it knows.
        self.tell(Kind::Lost, rank as u32, reason.as_bytes());
        self.inbox().lost.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Sends signs of life to a process: the body of a thread.
    fn live_for(&self, peer: usize, pause: Duration) {
        loop {
            thread::sleep(pause);
            let ends = self.inbox().closed;
            if ends || self.write(Kind::Alive, peer as u32, 0, b"").is_err() {
                return;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost(rank: usize, reason: &str) -> OpError {
    OpError::Lost {
        rank,
        reason: reason.to_owned(),
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "its process gives no sign of life".to_owned()
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            "its process is gone".to_owned()
        }
        _ => format!("its connection ended: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Instant;

    use burn::tensor::TensorData;

    use super::*;

    const QUICK: Patience = Patience {
        join: Duration::from_secs(20),
        alive: Duration::from_millis(50),
        silence: Duration::from_secs(2),
    };

    fn places(count: usize) -> Vec<Place> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        let of = |rank| Place::new(rank, count, "127.0.0.1", port);
        (0..count).map(of).collect()
    }

    fn words(words: &[u64]) -> Message {
        let words = words.to_vec();
        Message {
            words,
            tensors: Vec::new(),
        }
    }

    /// Runs each of `count` processes as a thread.
    fn all(count: usize, each: impl Fn(Processes) + Sync) {
        let places = places(count);
        thread::scope(|scope| {
            for place in &places {
                scope.spawn(|| each(Processes::at(place, QUICK).unwrap()));
            }
        });
    }

    #[test]
    fn messages_arrive_in_the_order_of_their_lane() {
        all(3, |processes| {
            let rank = processes.rank();
            let others: Vec<usize> = (0..3).filter(|&to| to != rank).collect();
            let tensor = |rank: usize| TensorData::new(vec![rank as f32; 1000], [10, 100]);
            for &to in &others {
                let mut first = words(&[11]);
                first.tensors.push(tensor(rank));
                let of_rank = words(&[rank as u64, 10]);
                for (lane, message) in [(1, of_rank), (0, first), (0, words(&[12]))] {
                    processes.send(to, lane, &message).unwrap();
                }
            }
            for &from in others.iter().rev() {
                let receive = |lane| processes.receive(from, lane).unwrap();
                let [first, second] = [(); 2].map(|()| receive(0));
                assert_eq!((first.words, second.words), (vec![11], vec![12]));
                assert_eq!(first.tensors[0], tensor(from));
                assert_eq!(receive(1), words(&[from as u64, 10]));
            }
            let end = |rank| processes.receive(rank, 0).unwrap_err();
            // One process ends a lane, and another leaves.
            match rank {
                2 => processes.end(7),
                _ => assert_eq!(processes.take(2, 7).unwrap_err(), OpError::Left { rank: 2 }),
            }
            match rank {
                1 => processes.leave(),
                _ => assert_eq!(end(1), OpError::Left { rank: 1 }),
            }
            assert_eq!(processes.lost(), None);
            // Rank 0 stays until all others have left.
            match rank {
                0 => assert_eq!(end(2), OpError::Left { rank: 2 }),
                _ => processes.leave(),
            }
        });
    }

    /// A process that fails, one that disappears, and one that stays connected without a sign of life.
    #[test]
    fn a_lost_process_is_named_to_all() {
        for (way, expected) in [
            ("fail", "out of memory"),
            ("go", "its process is gone"),
            ("stop", "its process gives no sign of life"),
        ] {
            let places = places(3);
            let until = Mutex::new(());
            let stays = until.lock().unwrap();
            thread::scope(|scope| {
                scope.spawn(|| match way {
                    "fail" => Processes::at(&places[1], QUICK)
                        .unwrap()
                        .fail("out of memory"),
                    _ => {
                        let socket = places[1].connect(QUICK.join).unwrap();
                        // Its connection stays open until the others have ended.
                        let stays = (way == "stop").then(|| until.lock());
                        drop((stays, socket));
                    }
                });
                let others: Vec<_> = ([0, 2].into_iter())
                    .map(|rank| {
                        let place = &places[rank];
                        scope.spawn(move || {
                            let processes = Processes::at(place, QUICK).unwrap();
                            let (sender, called) = std::sync::mpsc::channel();
                            processes.on_loss(move |lost| sender.send(lost).unwrap());
                            let began = Instant::now();
                            // The error is the same whichever process they wait for.
                            let error = processes.receive(2 - rank, 0).unwrap_err();
                            assert!(began.elapsed() < Duration::from_secs(10));
                            assert_eq!(called.recv().unwrap(), error);
                            assert_eq!(processes.lost(), Some(error.clone()));
                            error
                        })
                    })
                    .collect();
                for other in others {
                    let error = other.join().unwrap();
                    assert_eq!(error, lost(1, expected), "{way}");
                    assert!(error.to_string().contains("rank 1"), "{error}");
                }
                drop(stays);
            });
        }
    }
}
