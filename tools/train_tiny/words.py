"""The words that fill the grammars. Short, common and different from each other; most become one token."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """
    Ada Alma Anton Aron Bela Bruno Carla Cleo Dana Dario Doris Edgar Elio Emma Enzo Erik Fara Felix Flora Hugo Ida
    Igor Ines Iris Ivo Jana Kira Lena Leo Luca Mara Mila Nils Nora Olga Otto Pavel Rosa Sara Sofia Tara Tess Theo
    Timo Vera Viktor Yara Zoe
    """
)

NOUNS = _words(
    """
    anchor apple arrow basket bell boat book bottle box bridge brush bucket button candle car castle chair clock
    cloud coat coin cup desk door drum engine feather field fish flag flute fork fox garden gate glove hammer hat
    horse house island jar kettle key kite ladder lamp leaf lemon letter lion map mirror moon nest oven owl paint
    paper pen piano pipe plate pot radio ring river road robot rope sail scarf seed shelf ship shoe spoon stone
    storm sword table tent tiger tower train tree truck valve violin wagon wheel window wolf wool
    """
)

ADJECTIVES = _words(
    """
    amber black blue bold brave bright calm clean cold dark deep dry fast gold green grey heavy light long loud new
    old pale pink plain quiet red round sharp silver slow small soft tall warm white wide wild yellow young
    """
)

CITIES = _words(
    """
    Bern Cairo Dover Genoa Havana Kiel Kyoto Lagos Lima Lyon Malmo Milan Osaka Oslo Padua Paris Prague Quito Riga
    Rome Seoul Tokyo Vigo Zurich
    """
)

VERBS = _words(
    """
    build buy check clean close count draw find fix lift lock mark move open pack read scan sell send start stop
    store test track wash
    """
)

IDENTIFIERS = _words(
    """
    args best cache cost data edge flag head index item left line list node next page path pool queue rate right
    root rows score size span state step task text time total turn user value weight width
    """
)
