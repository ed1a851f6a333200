//! A search space that a person wrote: it is refused with words, or its arms can be listed.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use libfuzzer_sys::fuzz_target;
use nccltune::machine::NcclVersion;
use nccltune::space;

fuzz_target!(|text: &str| {
    let space = match space::parse(text, "space.toml") {
        Ok(space) => space,
        Err(error) => {
            assert!(error.to_string().contains("space.toml"), "a message names the file: {error}");
            return;
        }
    };
    let risks = [BTreeSet::new(), BTreeSet::from(["hang-prone".to_owned(), "unsafe-mixing".to_owned()])];
    let pins = [BTreeMap::new(), BTreeMap::from([("NCCL_P2P_DISABLE".to_owned(), "1".to_owned())])];
    for (risks, pins) in risks.iter().zip(&pins) {
        for version in [NcclVersion::v2(16, 2), NcclVersion::v2(28, 9)] {
            let Ok(found) = space::enumerate(&space, pins, version, risks) else { continue };
            let ids: BTreeSet<_> = found.arms.iter().map(|arm| &arm.id).collect();
            assert_eq!(ids.len(), found.arms.len(), "every arm is there once");
            assert!(found.arms.iter().any(|arm| arm.env.is_empty()), "the default is always there");
        }
    }
});
