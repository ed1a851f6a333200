//! Do bytes that one GPU writes arrive in another's memory? The driver's word alone is not enough: on
//! some machines access is granted, and the writes are lost or never end.

use rand::RngExt;

use super::ProbeReport;
use crate::bindings::cuda::{CudaError, Device, DeviceBuffer};
use crate::seed::Seed;

/// Bytes of each copy: a page, an odd number of 128-byte lines, and what takes copy engines a while.
const SIZES_BYTES: [usize; 4] = [PAGE_BYTES, 65_664, 1 << 20, 8 << 20];
const PAGE_BYTES: usize = 4096;
/// Wrong pairs that are told one by one.
const MOST_TOLD: usize = 8;

/// Copies random bytes between every two of these GPUs, both ways, each pushed by the sender and pulled
/// by the receiver, and compares what arrived.
pub(super) fn copy_between(ordinals: &[u32], seed: u64, report: &mut ProbeReport) {
    if let Err(error) = copy_all(ordinals, seed, report) {
        report.copy_errors.push(error.to_string());
    }
}

struct Peer {
    device: Device,
    source: DeviceBuffer,
    target: DeviceBuffer,
    /// What lies in the source.
    sent: Vec<u16>,
    /// What fills the target before each copy, so that what nobody overwrites does not look right.
    before: Vec<u16>,
}

fn copy_all(ordinals: &[u32], seed: u64, report: &mut ProbeReport) -> Result<(), CudaError> {
    let largest = SIZES_BYTES.into_iter().max().unwrap_or(0);
    let peers = ordinals
        .iter()
        .map(|ordinal| {
            let device = Device::open(*ordinal)?;
            let (source, target) = (device.allocate(largest)?, device.allocate(largest)?);
            let mut random = Seed(seed).derive("peer-copies", &ordinal.to_string());
            let sent: Vec<u16> = (0..largest / 2).map(|_| random.random()).collect();
            let before = (0..PAGE_BYTES / 2).map(|_| random.random()).collect();
            device.write(&source, 0, &sent)?;
            Ok(Peer { device, source, target, sent, before })
        })
        .collect::<Result<Vec<Peer>, CudaError>>()?;
    for (from, sender) in peers.iter().enumerate() {
        for (_, receiver) in peers.iter().enumerate().filter(|(to, _)| *to != from) {
            sender.device.enable_peer(&receiver.device)?;
        }
    }
    let mut copied_bytes = 0;
    for (from, sender) in peers.iter().enumerate() {
        for (to, receiver) in peers.iter().enumerate().filter(|(to, _)| *to != from) {
            for (way, mover) in [("pushed", sender), ("pulled", receiver)] {
                for bytes in SIZES_BYTES {
                    let wrong = wrong_elements(sender, receiver, mover, bytes)?;
                    copied_bytes += bytes as u64;
                    if wrong > 0 && report.copy_errors.len() < MOST_TOLD {
                        report.copy_errors.push(format!(
                            "of {bytes} bytes that were {way} from GPU {} to GPU {}, {} arrived wrong",
                            ordinals[from],
                            ordinals[to],
                            wrong * 2
                        ));
                    }
                }
            }
        }
    }
    report.copied_bytes = Some(copied_bytes);
    Ok(())
}

/// Copies once; how many of the receiver's numbers differ from the sender's.
fn wrong_elements(sender: &Peer, receiver: &Peer, mover: &Peer, bytes: usize) -> Result<usize, CudaError> {
    receiver.device.bind()?;
    receiver.device.write(&receiver.target, 0, &receiver.before)?;
    receiver.device.repeat(&receiver.target, PAGE_BYTES)?;
    receiver.device.synchronize()?;
    mover.device.copy_between(&sender.source, &receiver.target, bytes)?;
    mover.device.synchronize()?;
    receiver.device.bind()?;
    let mut arrived = vec![0; bytes / 2];
    receiver.target.read(0, &mut arrived)?;
    Ok(arrived.iter().zip(&sender.sent).filter(|(arrived, sent)| arrived != sent).count())
}
