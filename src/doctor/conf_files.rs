//! The files that set NCCL variables behind everybody's back: /etc/nccl.conf and the user's own.
//!
//! They are read by NCCL's rules (src/misc/param.cc, 2.19 to 2.30), not by those of env files: `#`
//! is a comment in column 0 only (2.22 sets a variable named `#...` even there, which nothing reads),
//! nothing is trimmed or unquoted, and what stands before the first `=` is the name, whatever it is.
//! NCCL puts each variable into the environment unless it is there, so the environment wins over the
//! user's file, that over /etc/nccl.conf, and in a file the first
//! line wins. A variable that a server finds "unset" may come from here.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::Path;

use super::environment::{as_set, described, is_logging, is_nccl};
use super::sight::{Sight, leads_out, under};
use super::{Finding, VERIFIED, listed, listed_as, shown};
use crate::env_syntax::{MAX_BYTES, MAX_LINES, is_name};
use crate::knob::read_as_nccl;
use crate::machine::NcclVersion;
use crate::record::{Origin, Pin};
use crate::wording::printable;

const SYSTEM_FILE: &str = "/etc/nccl.conf";
const USER_FILE: &str = ".nccl.conf";
const USER_FILE_VARIABLE: &str = "NCCL_CONF_FILE";
/// Bytes of a name or value that NCCL keeps.
const KEPT_BYTES: usize = 1023;
const MOST_SHOWN: usize = 12;
const MOST_TROUBLES_SHOWN: usize = 3;

/// The NCCL variables that these files set, each with the file it is in force from. What the
/// environment sets is not among them, nor what only says how NCCL logs: the tool sets that itself.
///
/// `home` is what the user database says, as NCCL does not ask `$HOME`. Without a `version` the
/// rules are those of the release the tool was checked with.
pub fn conf_variables(
    root: &Path,
    environment: &BTreeMap<String, String>,
    home: Option<&Path>,
    version: Option<NcclVersion>,
) -> Vec<Pin> {
    ConfFiles::look(root, environment, home, version).in_force()
}

/// Both files, in the order NCCL reads them.
pub(super) struct ConfFiles {
    files: Vec<ConfFile>,
}

/// One file that is there, or that somebody says is there.
struct ConfFile {
    /// What people call it; the user's home is not spelt out.
    name: String,
    origin: Origin,
    variables: Vec<ConfVariable>,
    /// Names of variables that are not NCCL's; their values are nobody's business.
    foreign: Vec<String>,
    /// What is wrong with it, in words.
    troubles: Vec<String>,
}

/// A variable of NCCL that a file sets.
struct ConfVariable {
    name: String,
    value: String,
    /// What set it before this line could.
    overruled_by: Option<&'static str>,
}

impl ConfFiles {
    pub(super) fn look(
        root: &Path,
        environment: &BTreeMap<String, String>,
        home: Option<&Path>,
        version: Option<NcclVersion>,
    ) -> Self {
        let version = version.unwrap_or(VERIFIED);
        let mut files: Vec<ConfFile> = user_file(root, environment, home, version).into_iter().collect();
        files.extend(ConfFile::read(SYSTEM_FILE.to_owned(), Origin::SystemConf, root, Path::new(SYSTEM_FILE)));
        let mut set: BTreeMap<String, &'static str> = BTreeMap::new();
        for file in &mut files {
            for variable in &mut file.variables {
                variable.overruled_by = if environment.contains_key(&variable.name) {
                    Some("the environment")
                } else {
                    set.get(&variable.name).copied()
                };
                let here = if file.origin == Origin::UserConf { "the user's file" } else { "an earlier line" };
                set.entry(variable.name.clone()).or_insert(here);
            }
        }
        Self { files }
    }

    /// What [`conf_variables`] returns.
    pub(super) fn in_force(&self) -> Vec<Pin> {
        let pin = |origin, variable: &ConfVariable| Pin {
            variable: variable.name.clone(),
            value: variable.value.clone(),
            origin,
        };
        self.files
            .iter()
            .flat_map(|file| file.variables.iter().map(|variable| (file.origin, variable)))
            .filter(|(_, variable)| variable.overruled_by.is_none() && !is_logging(&variable.name))
            .map(|(origin, variable)| pin(origin, variable))
            .collect()
    }
}

/// The file that `$NCCL_CONF_FILE` names, or the one in the user's home where it names none.
fn user_file(
    root: &Path,
    environment: &BTreeMap<String, String>,
    home: Option<&Path>,
    version: NcclVersion,
) -> Option<ConfFile> {
    let named = environment
        .get(USER_FILE_VARIABLE)
        .filter(|path| !read_as_nccl(USER_FILE_VARIABLE, path, version).is_without_effect());
    let Some(path) = named else {
        let path = home?.join(USER_FILE);
        return ConfFile::read(format!("~/{USER_FILE}"), Origin::UserConf, root, &path);
    };
    let name = format!("${USER_FILE_VARIABLE} ({})", printable(path, 120));
    // The usual way to switch the file in the home off.
    if path == "/dev/null" {
        return None;
    }
    let troubled = |words: &str| ConfFile {
        name: name.clone(),
        origin: Origin::UserConf,
        variables: Vec::new(),
        foreign: Vec::new(),
        troubles: vec![words.to_owned()],
    };
    if !path.starts_with('/') {
        return Some(troubled("is relative, so which file it is depends on where the server starts; it was not read"));
    }
    let found = ConfFile::read(name.clone(), Origin::UserConf, root, Path::new(path));
    Some(found.unwrap_or_else(|| troubled("is not there, and NCCL then reads no file of the user at all")))
}

impl ConfFile {
    /// None where there is no such file.
    fn read(name: String, origin: Origin, root: &Path, path: &Path) -> Option<Self> {
        let mut file = Self { name, origin, variables: Vec::new(), foreign: Vec::new(), troubles: Vec::new() };
        let path = under(root, path);
        if leads_out(root, &path) {
            file.troubles.push("leads out of the folder that stands for the machine and was not read".to_owned());
            return Some(file);
        }
        match contents(&path) {
            Ok(bytes) => file.parse(bytes),
            Err(Unread::Missing) => return None,
            Err(Unread::NoFile) => file.troubles.push("is no regular file and was not read".to_owned()),
            Err(Unread::Failed(kind)) => {
                file.troubles.push(format!("cannot be read ({kind}); NCCL passes over it too"));
            }
        }
        Some(file)
    }

    fn parse(&mut self, mut bytes: Vec<u8>) {
        if bytes.len() > MAX_BYTES {
            bytes.truncate(MAX_BYTES);
            self.troubles.push(format!("is larger than {MAX_BYTES} bytes; only its beginning was read"));
            // The last line is cut; it says the same to NCCL only if NCCL would have cut it too.
            let start = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            let kept = bytes[start..].iter().position(|byte| *byte == b'=').map(|equals| start + equals + KEPT_BYTES);
            if kept.is_none_or(|end| end >= bytes.len()) {
                bytes.truncate(start);
            }
        }
        for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
            if number > MAX_LINES && !line.is_empty() {
                self.troubles.push(format!("has more than {MAX_LINES} lines; the rest was not read"));
                break;
            }
            self.parse_line(number, line);
        }
    }

    fn parse_line(&mut self, number: usize, line: &[u8]) {
        if line.first() == Some(&b'#') {
            return;
        }
        // To NCCL a line is a C string.
        let line = line.split(|byte| *byte == 0).next().unwrap_or_default();
        let Some(equals) = line.iter().position(|byte| *byte == b'=') else {
            if !line.iter().all(u8::is_ascii_whitespace) {
                self.troubles.push(format!("line {number} has no `=`, so NCCL passes over it"));
            }
            return;
        };
        let kept = |bytes: &[u8]| -> Option<String> {
            str::from_utf8(&bytes[..bytes.len().min(KEPT_BYTES)]).ok().map(str::to_owned)
        };
        let (Some(name), Some(value)) = (kept(&line[..equals]), kept(&line[equals + 1..])) else {
            self.troubles.push(format!("line {number} is no text"));
            return;
        };
        if !is_name(&name) {
            let name = printable(&name, 60);
            self.troubles.push(format!("line {number} sets a variable named {name:?}, which nothing reads"));
        } else if is_nccl(&name) {
            self.variables.push(ConfVariable { name, value, overruled_by: None });
        } else {
            self.foreign.push(printable(&name, 60));
        }
    }

    /// What the file holds and what is wrong with it; none where it holds nothing.
    fn told(&self, version: NcclVersion) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        if !self.variables.is_empty() {
            let variables = listed_as(&self.variables, MOST_SHOWN, ", ", |variable| variable.told(version));
            parts.push(format!("sets {variables}"));
        }
        if !self.foreign.is_empty() {
            parts.push(format!("sets variables that are not NCCL's: {}", listed(&self.foreign, MOST_SHOWN, ", ")));
        }
        if !self.troubles.is_empty() {
            parts.push(listed(&self.troubles, MOST_TROUBLES_SHOWN, "; "));
        }
        (!parts.is_empty()).then(|| format!("{} {}", self.name, parts.join("; ")))
    }
}

impl ConfVariable {
    fn told(&self, version: NcclVersion) -> String {
        match self.overruled_by {
            Some(by) => format!("{} (not in force: {by} sets it)", as_set(&self.name, &self.value)),
            None => described(&self.name, &self.value, version),
        }
    }
}

/// Why a file was not read.
enum Unread {
    Missing,
    NoFile,
    Failed(ErrorKind),
}

fn contents(path: &Path) -> Result<Vec<u8>, Unread> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Unread::Missing,
        kind => Unread::Failed(kind),
    };
    // A pipe would be waited for, and a device never ends.
    if !fs_err::metadata(path).map_err(failed)?.is_file() {
        return Err(Unread::NoFile);
    }
    let mut bytes = Vec::new();
    let file = fs_err::File::open(path).map_err(failed)?;
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

pub(super) fn check(sight: &Sight<'_>) -> Finding {
    let told: Vec<String> = sight.conf.files.iter().filter_map(|file| file.told(sight.version())).collect();
    if told.is_empty() {
        return Finding::pass(match sight.conf.files.as_slice() {
            [] => format!("neither {SYSTEM_FILE} nor a file of the user is there"),
            files => {
                let names: Vec<String> = files.iter().map(|file| shown(&file.name)).collect();
                format!("nothing is set in {}", names.join(" or "))
            }
        });
    }
    Finding::warn(
        told.join("; "),
        "what these files set is in force in every arm, the default included, and the answer holds only with it: \
         make sure that the server sees the same files, inside its container too",
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fixtures::Planted;
    use super::*;
    use crate::record::Check;
    use crate::record::CheckVerdict::{Pass, Warn};

    fn in_force(planted: &Planted) -> Vec<(String, String, Origin)> {
        let facts = planted.facts();
        let version = facts.nccl.map(|library| NcclVersion::from_code(library.version));
        let pins = conf_variables(facts.root, facts.environment, facts.home, version);
        pins.into_iter().map(|pin| (pin.variable, pin.value, pin.origin)).collect()
    }

    fn owned(expected: &[(&str, &str, Origin)]) -> Vec<(String, String, Origin)> {
        expected.iter().map(|(name, value, origin)| ((*name).to_owned(), (*value).to_owned(), *origin)).collect()
    }

    /// What a system file with these contents does.
    fn system(contents: impl AsRef<[u8]>) -> (Check, Vec<(String, String)>) {
        let planted = Planted::healthy();
        planted.write("/etc/nccl.conf", contents);
        let variables = in_force(&planted).into_iter().map(|(name, value, _)| (name, value)).collect();
        (planted.check("conf-files"), variables)
    }

    #[test]
    fn no_file_and_a_file_without_settings_pass() {
        let check = Planted::healthy().check("conf-files");
        assert_eq!(check.verdict, Pass);
        assert_eq!(check.evidence, "neither /etc/nccl.conf nor a file of the user is there");
        let (check, variables) = system("# NCCL_ALGO=Ring\n\n");
        assert_eq!((check.verdict, variables.len()), (Pass, 0));
        assert_eq!(check.evidence, "nothing is set in /etc/nccl.conf");
    }

    #[test]
    fn the_environment_wins_over_the_user_and_the_user_over_the_system() {
        let mut planted = Planted::healthy();
        planted.set("NCCL_ALGO", "Tree");
        planted.write("/srv/alice/.nccl.conf", "NCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_PROTO=Simple\n");
        planted.write("/etc/nccl.conf", "NCCL_PROTO=LL128\nNCCL_NTHREADS=256\nNCCL_ALGO=NVLS\n");
        assert_eq!(
            in_force(&planted),
            owned(&[("NCCL_PROTO", "LL", Origin::UserConf), ("NCCL_NTHREADS", "256", Origin::SystemConf)])
        );
        let check = planted.check("conf-files");
        assert_eq!(check.verdict, Warn);
        insta::assert_snapshot!(check.evidence);
    }

    #[test]
    fn a_variable_that_is_set_to_nothing_still_wins() {
        let mut planted = Planted::healthy();
        planted.set("NCCL_ALGO", "");
        planted.write("/etc/nccl.conf", "NCCL_ALGO=Ring\n");
        assert_eq!(in_force(&planted), []);
    }

    #[test]
    fn a_named_file_stands_in_for_the_one_at_home() {
        let mut planted = Planted::healthy();
        planted.write("/srv/alice/.nccl.conf", "NCCL_ALGO=Ring\n");
        planted.write("/opt/team.conf", "NCCL_PROTO=LL\n");
        planted.set("NCCL_CONF_FILE", "/opt/team.conf");
        assert_eq!(in_force(&planted), owned(&[("NCCL_PROTO", "LL", Origin::UserConf)]));
        assert!(
            planted.check("conf-files").evidence.starts_with("$NCCL_CONF_FILE (/opt/team.conf) sets NCCL_PROTO=LL")
        );
        planted.set("NCCL_CONF_FILE", "");
        assert_eq!(in_force(&planted), owned(&[("NCCL_ALGO", "Ring", Origin::UserConf)]));
        planted.set("NCCL_CONF_FILE", "/dev/null");
        assert_eq!(in_force(&planted), []);
        assert_eq!(planted.check("conf-files").verdict, Pass);
    }

    #[test]
    fn releases_before_2_23_know_no_named_file() {
        let mut planted = Planted::healthy();
        planted.write("/srv/alice/.nccl.conf", "NCCL_ALGO=Ring\n");
        planted.set("NCCL_CONF_FILE", "/opt/team.conf");
        assert_eq!(in_force(&planted), []);
        planted.set_version(22_203);
        assert_eq!(in_force(&planted), owned(&[("NCCL_ALGO", "Ring", Origin::UserConf)]));
    }

    #[test]
    fn a_named_file_that_is_not_there_or_relative_warns() {
        let mut planted = Planted::healthy();
        planted.set("NCCL_CONF_FILE", "/opt/none.conf");
        let check = planted.check("conf-files");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("(/opt/none.conf) is not there"), "{}", check.evidence);
        planted.set("NCCL_CONF_FILE", "team.conf");
        let check = planted.check("conf-files");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("is relative"), "{}", check.evidence);
    }

    #[test]
    fn lines_are_read_by_nccls_rules() {
        let text = " # NCCL_A=1\nNCCL_MIN_NCHANNELS= 8 \nexport NCCL_B=1\nNCCL_C =1\nNCCL_PROTO=\"LL\"\n\
                    NCCL_ALGO=Ring # why\r\nNCCL_D=a=b\n=x\nNCCL_NTHREADS\nNCCL_NET=last";
        let (check, variables) = system(text);
        let expected = [
            ("NCCL_MIN_NCHANNELS", " 8 "),
            ("NCCL_PROTO", "\"LL\""),
            ("NCCL_ALGO", "Ring # why\r"),
            ("NCCL_D", "a=b"),
            ("NCCL_NET", "last"),
        ];
        assert_eq!(variables, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        for words in ["\" # NCCL_A\"", "\"export NCCL_B\"", "\"NCCL_C \"", "and 2 more"] {
            assert!(check.evidence.contains(words), "{words}: {}", check.evidence);
        }
        assert!(!check.evidence.contains('\r'));
    }

    #[test]
    fn what_nccl_misreads_is_said() {
        let (check, _) = system("NCCL_BUFFSIZE=4M\nNCCL_ALGOS=Ring\n");
        assert!(check.evidence.contains("write NCCL_BUFFSIZE=4194304"), "{}", check.evidence);
        assert!(check.evidence.contains("did you mean NCCL_ALGO?"), "{}", check.evidence);
    }

    #[test]
    fn logging_and_foreign_variables_are_not_handed_on() {
        let (check, variables) = system("NCCL_DEBUG=INFO\nNCCL_DEBUG_FILE=/opt/x\nLD_PRELOAD=/opt/secret.so\n");
        assert_eq!(variables, []);
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("NCCL_DEBUG=INFO"), "{}", check.evidence);
        assert!(check.evidence.contains("not NCCL's: LD_PRELOAD") && !check.evidence.contains("secret"));
    }

    #[test]
    fn a_binary_file_neither_panics_nor_reaches_the_terminal() {
        let mut bytes: Vec<u8> = (0..=255).cycle().take(40_000).collect();
        bytes.extend(b"\nNCCL_ALGO=Ring\0=Tree\nNCCL_\0PROTO=LL\nNCCL_NET=\xff\xfe\n");
        let (check, variables) = system(bytes);
        assert_eq!(variables, [("NCCL_ALGO".to_owned(), "Ring".to_owned())]);
        assert!(check.evidence.chars().all(|character| !character.is_control()) && check.evidence.len() < 2000);
    }

    #[test]
    fn ten_megabytes_are_not_read_to_the_end() {
        let line = "NCCL_NTHREADS=256 and some padding to have fewer lines than the limit, which is tested elsewhere, \
                    so that it is the size that ends the reading of this file\n";
        let text = line.repeat(10 * MAX_BYTES / line.len());
        let (check, variables) = system(text);
        assert_eq!(variables.len(), 1, "the first line wins");
        assert!(check.evidence.contains("only its beginning was read"), "{}", check.evidence);
        assert!(check.evidence.len() < 10_000);
    }

    #[test]
    fn an_endless_line_is_cut_where_nccl_cuts_it() {
        let (check, variables) = system(format!("NCCL_NET={}", "x".repeat(10 * MAX_BYTES)));
        assert_eq!(variables, [("NCCL_NET".to_owned(), "x".repeat(KEPT_BYTES))]);
        assert!(check.evidence.len() < 1000);
        let (_, variables) = system("x".repeat(10 * MAX_BYTES));
        assert_eq!(variables, []);
    }

    #[test]
    fn a_line_that_is_cut_by_the_limit_is_not_half_read() {
        let padding = "#".repeat(MAX_BYTES - 1 - "NCCL_NET=so".len());
        let (_, variables) = system(format!("{padding}\nNCCL_NET=socket\n"));
        assert_eq!(variables, []);
    }

    #[test]
    fn more_lines_than_anybody_writes_are_not_read() {
        let lines: Vec<String> = (0..20_000).map(|number| format!("NCCL_X{number}=1")).collect();
        let (check, variables) = system(lines.join("\n"));
        assert_eq!(variables.len(), MAX_LINES);
        assert!(check.evidence.contains("has more than 10000 lines"), "{}", check.evidence);
        let (check, _) = system("NCCL_X=1\n".repeat(MAX_LINES));
        assert!(!check.evidence.contains("lines"), "{}", check.evidence);
    }

    #[test]
    fn what_is_no_file_is_never_opened() {
        let planted = Planted::healthy();
        planted.folder("/etc");
        nix::unistd::mkfifo(&planted.path("/etc/nccl.conf"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        planted.folder("/srv/alice/.nccl.conf");
        let check = planted.check("conf-files");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("/etc/nccl.conf is no regular file"), "{}", check.evidence);
        assert!(check.evidence.contains("~/.nccl.conf is no regular file"), "{}", check.evidence);
    }

    #[test]
    fn a_home_that_is_not_known_leaves_the_system_file() {
        let mut planted = Planted::healthy();
        planted.home = None;
        planted.write("/etc/nccl.conf", "NCCL_PROTO=LL\n");
        assert_eq!(in_force(&planted), owned(&[("NCCL_PROTO", "LL", Origin::SystemConf)]));
    }

    proptest! {
        #[test]
        fn no_file_makes_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut file = ConfFile {
                name: String::new(),
                origin: Origin::SystemConf,
                variables: Vec::new(),
                foreign: Vec::new(),
                troubles: Vec::new(),
            };
            file.parse(bytes);
            prop_assert!(file.variables.iter().all(|variable| is_name(&variable.name)));
        }
    }
}
