//! Connects the processes with each other.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::OpError;

/// First bytes of every connection.
const MAGIC: &[u8; 8] = b"BSPROCS1";
/// Answer of rank 0 once all processes have connected.
const WELCOME: u8 = 1;
/// Time limit for a connection to identify itself.
const HELLO: Duration = Duration::from_secs(5);

/// Rank and address of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub rank: usize,
    pub count: usize,
    pub local_rank: usize,
    /// Number of processes on its host, if known.
    pub local_count: Option<usize>,
    /// Host on which rank 0 listens.
    pub address: String,
    pub port: u16,
}

impl Place {
    /// Creates a place without information about its host.
    pub fn new(rank: usize, count: usize, address: &str, port: u16) -> Self {
        Self {
            rank,
            count,
            local_rank: 0,
            local_count: None,
            address: address.to_owned(),
            port,
        }
    }

    /// Reads the variables that `torchrun` and OpenMPI's `mpirun` set.
    pub fn of_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Self, OpError> {
        let number = |name: &'static str, other: &str, missing: Option<usize>| {
            let expected = "a number, as torchrun and mpirun set it";
            match (variable(name).or_else(|| variable(other)), missing) {
                (Some(text), _) => text
                    .parse()
                    .map_err(|_| OpError::argument(name, expected, format!("'{text}'"))),
                (None, Some(missing)) => Ok(missing),
                (None, None) => Err(OpError::argument(name, expected, "no such variable")),
            }
        };
        let port = number("MASTER_PORT", "MASTER_PORT", Some(29500))?;
        let port = u16::try_from(port)
            .map_err(|_| OpError::argument("MASTER_PORT", "a port of TCP", port))?;
        // In that case `torchrun` itself listens at the port.
        let is_taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|is| is == "True");
        let local_count = number("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", Some(0))?;
        Ok(Self {
            local_count: (local_count > 0).then_some(local_count),
            rank: number("RANK", "OMPI_COMM_WORLD_RANK", None)?,
            count: number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", None)?,
            local_rank: number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", Some(0))?,
            address: variable("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".to_owned()),
            port: match is_taken {
                true => port.checked_add(1).unwrap_or(port - 1),
                false => port,
            },
        })
    }

    fn error(&self, reason: impl Into<String>) -> OpError {
        OpError::Join {
            address: format!("{}:{}", self.address, self.port),
            reason: reason.into(),
        }
    }

    /// Connects to the other processes. Rank 0 gets a connection to each of them, every other process one to rank 0.
    pub fn connect(&self, patience: Duration) -> Result<Vec<Option<TcpStream>>, OpError> {
        let Self { rank, count, .. } = *self;
        if rank >= count {
            let expected = format!("below WORLD_SIZE, which is {count}");
            return Err(OpError::argument("RANK", expected, rank));
        }
        let until = Instant::now() + patience;
        let mut sockets: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
        match rank {
            0 if count > 1 => self.listen(until, &mut sockets)?,
            0 => {}
            _ => sockets[0] = Some(self.call(until)?),
        }
        Ok(sockets)
    }

    fn listen(&self, until: Instant, sockets: &mut [Option<TcpStream>]) -> Result<(), OpError> {
        let listener = TcpListener::bind((self.address.as_str(), self.port));
        let listener = listener.and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = listener.map_err(|error| {
            self.error(format!(
                "rank 0 cannot listen there, as MASTER_ADDR and MASTER_PORT say: {error}"
            ))
        })?;
        while sockets[1..].iter().any(Option::is_none) {
            match listener.accept() {
                Ok((socket, _)) => {
                    // Other callers do not belong to the processes.
                    let Ok(hello) = hello(&socket) else { continue };
                    let Some((rank, count)) = hello else { continue };
                    let known = sockets.len();
                    if count != known {
                        let text =
                            format!("rank {rank} is one of {count} processes, rank 0 of {known}");
                        return Err(self.error(text));
                    }
                    match sockets.get_mut(rank) {
                        Some(place @ None) if rank > 0 => *place = Some(socket),
                        _ => return Err(self.error(format!("two processes have the rank {rank}"))),
                    }
                }
                Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
                Err(_) => {
                    let missing = (1..sockets.len()).filter(|&rank| sockets[rank].is_none());
                    let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
                    return Err(self.error(format!("rank {} did not come", missing.join(", "))));
                }
            }
        }
        for mut socket in sockets[1..].iter().flatten() {
            let welcomed = socket.write_all(&[WELCOME]);
            welcomed.map_err(|error| self.error(format!("a process has gone again: {error}")))?;
        }
        Ok(())
    }

    fn call(&self, until: Instant) -> Result<TcpStream, OpError> {
        let mut socket = loop {
            match TcpStream::connect((self.address.as_str(), self.port)) {
                Ok(socket) => break socket,
                Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(100)),
                Err(error) => {
                    let text = "rank 0 does not listen there, as MASTER_ADDR and MASTER_PORT say";
                    return Err(self.error(format!("{text}: {error}")));
                }
            }
        };
        let left = until.saturating_duration_since(Instant::now()) + HELLO;
        let mut joined = || -> io::Result<()> {
            let numbers = [self.rank, self.count].map(|number| (number as u32).to_le_bytes());
            socket.write_all(&[&MAGIC[..], &numbers.concat()].concat())?;
            socket.set_read_timeout(Some(left))?;
            socket.read_exact(&mut [0])
        };
        let joined = joined();
        joined.map_err(|_| self.error("rank 0 has ended before all processes had come"))?;
        Ok(socket)
    }
}

/// Reads the rank and the number of processes of a caller. Returns `None` if it is not one of the processes.
fn hello(mut socket: &TcpStream) -> io::Result<Option<(usize, usize)>> {
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(HELLO))?;
    let mut bytes = [0; 16];
    socket.read_exact(&mut bytes)?;
    let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte])) as usize;
    Ok((bytes[..8] == *MAGIC).then(|| (number(8), number(12))))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn place(text: &str) -> Result<Place, String> {
        let variables: HashMap<&str, &str> = (text.split_whitespace())
            .map(|part| part.split_once('=').unwrap())
            .collect();
        let place =
            Place::of_environment(|name| variables.get(name).map(|&value| value.to_owned()));
        place.map_err(|error| error.to_string())
    }

    #[test]
    fn variables_are_read() {
        let all = place("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=a.b MASTER_PORT=7").unwrap();
        let expected = Place::new(3, 4, "a.b", 7);
        let local_rank = 1;
        assert_eq!(
            all,
            Place {
                local_rank,
                ..expected
            }
        );
        let by_mpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1";
        let place_of_mpi = place(by_mpi).unwrap();
        assert_eq!((place_of_mpi.rank, place_of_mpi.local_rank), (3, 1));
        assert_eq!(
            (&place_of_mpi.address[..], place_of_mpi.port),
            ("127.0.0.1", 29500)
        );
        // `torchrun` runs its own store at the port.
        for (port, expected) in [(29400, 29401), (65535, 65534)] {
            let more = format!("MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True");
            let place = place(&format!("RANK=0 WORLD_SIZE=2 {more}"));
            assert_eq!(place.unwrap().port, expected);
        }
        for (text, error) in [
            (
                "WORLD_SIZE=2",
                "RANK must be a number, as torchrun and mpirun set it, got no such variable",
            ),
            (
                "RANK=x WORLD_SIZE=2",
                "RANK must be a number, as torchrun and mpirun set it, got 'x'",
            ),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_PORT=70000",
                "MASTER_PORT must be a port of TCP, got 70000",
            ),
        ] {
            assert_eq!(place(text).unwrap_err(), error);
        }
        let out = place("RANK=2 WORLD_SIZE=2").unwrap().connect(HELLO);
        assert_eq!(
            out.unwrap_err().to_string(),
            "RANK must be below WORLD_SIZE, which is 2, got 2"
        );
    }

    #[test]
    fn who_does_not_come_is_named() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        let join = |rank, count, ms| {
            let place = Place::new(rank, count, "127.0.0.1", port);
            let joined = place.connect(Duration::from_millis(ms));
            joined.map(drop).map_err(|error| error.to_string())
        };
        let error = join(0, 2, 100).unwrap_err();
        assert!(error.contains("rank 0 cannot listen there"), "{error}");
        drop(free);
        let error = join(1, 2, 100).unwrap_err();
        assert!(error.contains("rank 0 does not listen there"), "{error}");
        let error = join(0, 3, 100).unwrap_err();
        assert!(error.contains("rank 1, 2 did not come"), "{error}");
        thread::scope(|scope| {
            let other = scope.spawn(|| join(1, 3, 5_000));
            let error = join(0, 2, 5_000).unwrap_err();
            assert!(
                error.contains("rank 1 is one of 3 processes, rank 0 of 2"),
                "{error}"
            );
            let error = other.join().unwrap().unwrap_err();
            assert!(error.contains("rank 0 has ended before"), "{error}");
        });
    }
}
