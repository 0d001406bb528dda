//! The commands that every program has: completions for shells, and man pages. Both are made from its flags, so they cannot say
//! anything else than `--help`.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::{ArgMatches, Command, FromArgMatches, Subcommand};
use clap_complete::Shell;

#[derive(Debug, Subcommand)]
enum Pages {
    /// Print completions for a shell.
    ///
    /// For bash: source <(PROGRAM completions bash), or write them to a file in ~/.local/share/bash-completion/completions that
    /// has the name of the program.
    Completions {
        /// The shell that reads them.
        shell: Shell,
    },
    /// Print the man page of the program, or write those of all its commands to a directory.
    Man {
        /// Directory for the pages, a file for each command, such as /usr/local/share/man/man1. It is made if it does not exist.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

/// The program with these commands. One that had no commands needs none of its flags for them.
pub(crate) fn add(program: Command) -> Command {
    let program = match program.has_subcommands() {
        true => program,
        false => program.subcommand_negates_reqs(true).args_conflicts_with_subcommands(true),
    };
    let is_required = program.is_subcommand_required_set();
    Pages::augment_subcommands(program).subcommand_required(is_required)
}

/// Whether it was one of these commands, which is then done.
pub(crate) fn run(program: &Command, given: &ArgMatches) -> Result<bool, Box<dyn Error>> {
    let Ok(pages) = Pages::from_arg_matches(given) else { return Ok(false) };
    match pages {
        Pages::Completions { shell } => {
            let (mut program, name) = (program.clone(), program.get_name().to_owned());
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut program, name, &mut text);
            crate::print(&String::from_utf8(text)?)?;
        }
        Pages::Man { out: None } => {
            // As those of all commands are written.
            let mut program = program.clone().disable_help_subcommand(true);
            program.build();
            let mut text = Vec::new();
            clap_mangen::Man::new(program).render(&mut text)?;
            crate::print(&String::from_utf8(text)?)?;
        }
        Pages::Man { out: Some(dir) } => {
            write(program, &dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        }
    }
    Ok(true)
}

#[expect(clippy::disallowed_methods, reason = "man pages can be written again: no test kills a program here")]
fn write(program: &Command, dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    clap_mangen::generate_to(program.clone(), dir)
}
