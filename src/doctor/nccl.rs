//! The NCCL library.

use std::path::{Path, PathBuf};

use super::sight::Sight;
use super::{Finding, listed, shown};
use crate::machine::{LibrarySource, NcclVersion};

/// The release that the results of this version of the tool were checked with.
pub const VERIFIED: NcclVersion = NcclVersion::v2(28, 9);
/// First release that understands `allreduce:Ring`.
const PER_COLLECTIVE: NcclVersion = NcclVersion::v2(24, 3);
/// First release this version knows enough about to measure with.
const OLDEST: NcclVersion = NcclVersion::v2(19, 0);

const NO_LIBRARY: &str = "there is no NCCL library";
const NAME_ONE: &str = "name the one your server loads with --nccl-lib PATH \
                        (in a Python environment: site-packages/nvidia/nccl/lib/libnccl.so.2)";

const fn source_words(source: LibrarySource) -> &'static str {
    match source {
        LibrarySource::User => "named by the user",
        LibrarySource::PythonEnvironment => "in the Python environment",
        LibrarySource::Loader => "found by the loader",
    }
}

pub(super) fn found(sight: &Sight<'_>) -> Finding {
    match sight.facts.nccl {
        Some(library) => Finding::pass(format!(
            "NCCL {} at {}, {}",
            NcclVersion::from_code(library.version),
            shown(&library.path),
            source_words(library.source)
        )),
        None => Finding::fail(shown(sight.facts.nccl_error.unwrap_or(NO_LIBRARY)), NAME_ONE),
    }
}

pub(super) fn unambiguous(sight: &Sight<'_>) -> Finding {
    let facts = sight.facts;
    let named = facts.candidates.user.iter().map(|path| (path.as_path(), LibrarySource::User));
    let python = facts.candidates.python.iter().map(|path| (path.as_path(), LibrarySource::PythonEnvironment));
    let loader = facts.loader_nccl.iter().map(|(path, _)| (Path::new(*path), LibrarySource::Loader));
    let mut libraries: Vec<(PathBuf, LibrarySource)> = Vec::new();
    for (path, source) in named.chain(python).chain(loader) {
        let path = sight.real_path(path);
        if !libraries.iter().any(|(known, _)| *known == path) {
            libraries.push((path, source));
        }
    }
    let used = facts.nccl.map(|library| sight.real_path(Path::new(&library.path)));
    let loader = facts.loader_nccl.map(|(path, code)| (sight.real_path(Path::new(path)), NcclVersion::from_code(code)));
    let each: Vec<String> = libraries
        .iter()
        .map(|(path, source)| {
            let mut words = vec![source_words(*source).to_owned()];
            let is_used = used.as_ref() == Some(path);
            words.extend(sight.known_version().filter(|_| is_used).map(|version| version.to_string()));
            words.extend(
                loader.iter().filter(|(found, _)| found == path && !is_used).map(|(_, version)| version.to_string()),
            );
            words.extend(is_used.then(|| "used here".to_owned()));
            format!("{} ({})", shown(&path.to_string_lossy()), words.join(", "))
        })
        .collect();
    match each.as_slice() {
        [] => Finding::unknown(NO_LIBRARY),
        [only] => Finding::pass(format!("one library: {only}")),
        _ => Finding::warn(
            listed(&each, 8, "; "),
            "the server may load another one than is measured here: find out which (its own log says \
             \"NCCL version\"), and name that one with --nccl-lib",
        ),
    }
}

pub(super) fn verified_version(sight: &Sight<'_>) -> Finding {
    match sight.known_version() {
        None => Finding::unknown(NO_LIBRARY),
        Some(VERIFIED) => Finding::pass(format!("NCCL {VERIFIED}")),
        Some(version) => Finding::warn(
            format!("NCCL {version}; this tool's results were checked on {VERIFIED} only"),
            "what is measured still holds; what the tool expects of NCCL may not: read its notices with care",
        ),
    }
}

pub(super) fn old(sight: &Sight<'_>) -> Finding {
    match sight.known_version() {
        None => Finding::unknown(NO_LIBRARY),
        Some(version) if version < OLDEST => Finding::fail(
            format!("NCCL {version} is older than {OLDEST}"),
            format!("use {OLDEST} or newer, best {VERIFIED}"),
        ),
        Some(version) if version < PER_COLLECTIVE => Finding::warn(
            format!("NCCL {version} has no algorithms and protocols by collective, which came with {PER_COLLECTIVE}"),
            "arms that need them are left out, and every setting of NCCL_ALGO or NCCL_PROTO reaches all collectives: \
             a newer release gives more to choose from",
        ),
        Some(version) => Finding::pass(format!("NCCL {version}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use crate::record::CheckVerdict::{Fail, Pass, Unknown, Warn};

    #[test]
    fn a_library_is_named_with_its_version_and_origin() {
        let check = Planted::healthy().check("nccl-found");
        assert_eq!(check.verdict, Pass);
        let path = "/opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2";
        assert_eq!(check.evidence, format!("NCCL 2.28.9 at {path}, in the Python environment"));
    }

    #[test]
    fn no_library_fails_in_the_words_of_the_search() {
        let mut planted = Planted::healthy();
        planted.nccl = None;
        planted.nccl_error = Some("no NCCL library found: nowhere".to_owned());
        let check = planted.check("nccl-found");
        assert_eq!((check.verdict, check.evidence.as_str()), (Fail, "no NCCL library found: nowhere"));
        planted.nccl_error = None;
        assert_eq!(planted.check("nccl-found").verdict, Fail);
        for name in ["nccl-verified-version", "nccl-old"] {
            assert_eq!(planted.check(name).verdict, Unknown, "{name}");
        }
    }

    #[test]
    fn one_file_by_many_names_is_one_library() {
        let mut planted = Planted::healthy();
        assert_eq!(planted.check("nccl-unambiguous").verdict, Pass);
        let python = planted.candidates.python[0].to_string_lossy().into_owned();
        let target = format!("../..{python}");
        planted.link("/usr/lib/libnccl.so.2", &target);
        planted.loader_nccl = Some(("/usr/lib/libnccl.so.2".to_owned(), 22_809));
        planted.candidates.user = Some("/usr/lib/libnccl.so.2".into());
        let check = planted.check("nccl-unambiguous");
        assert_eq!(check.verdict, Pass, "{}", check.evidence);
    }

    #[test]
    fn several_libraries_are_listed_with_the_one_in_use() {
        let mut planted = Planted::healthy();
        planted.write("/usr/lib/libnccl.so.2", "another library");
        planted.loader_nccl = Some(("/usr/lib/libnccl.so.2".to_owned(), 22_304));
        let check = planted.check("nccl-unambiguous");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("(in the Python environment, 2.28.9, used here)"), "{}", check.evidence);
        assert!(
            check.evidence.ends_with("; /usr/lib/libnccl.so.2 (found by the loader, 2.23.4)"),
            "{}",
            check.evidence
        );
        assert!(check.advice.contains("--nccl-lib"));
    }

    #[test]
    fn a_library_the_user_names_does_not_silence_the_others() {
        let mut planted = Planted::healthy();
        planted.write("/opt/nccl/libnccl.so.2", "the user's");
        planted.candidates.user = Some("/opt/nccl/libnccl.so.2".into());
        planted.nccl.as_mut().unwrap().path = "/opt/nccl/libnccl.so.2".to_owned();
        let check = planted.check("nccl-unambiguous");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.starts_with("/opt/nccl/libnccl.so.2 (named by the user, 2.28.9, used here); "));
    }

    #[test]
    fn no_library_at_all_leaves_nothing_to_compare() {
        assert_eq!(Planted::without_driver().check("nccl-unambiguous").verdict, Unknown);
    }

    #[test]
    fn versions_are_graded() {
        let mut planted = Planted::healthy();
        for (code, verified, old) in [
            (22_809, Pass, Pass),
            (23_007, Warn, Pass),
            (22_808, Warn, Pass),
            (22_403, Warn, Pass),
            (22_304, Warn, Warn),
            (21_903, Warn, Warn),
            (21_805, Warn, Fail),
            (2_708, Warn, Fail),
        ] {
            planted.set_version(code);
            assert_eq!(planted.check("nccl-verified-version").verdict, verified, "{code}");
            assert_eq!(planted.check("nccl-old").verdict, old, "{code}");
        }
    }
}
