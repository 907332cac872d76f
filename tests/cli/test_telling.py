"""What a command says while it takes its time, where there is no terminal to draw on."""

from shoal.cli.telling import telling


def test_without_a_terminal_every_stage_is_a_line(capsys):
    with telling() as tell:
        tell("measuring a step of [digits]")
        tell("training")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "measuring a step of [digits]\ntraining\n")


def test_a_quiet_command_says_nothing(capsys):
    with telling(quiet=True) as tell:
        tell("training")
    assert capsys.readouterr().err == ""
